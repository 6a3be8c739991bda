"""The shape of DeepSpeed-Chat's raw_datasets.py: a base of empty methods, and a class for each data set."""

import os

from datasets import load_dataset, load_from_disk
from torch.utils.data import Subset


class PromptRawDataset:
    def __init__(self, output_path, seed, local_rank, dataset_name):
        self.output_path, self.seed, self.local_rank = output_path, seed, local_rank
        if os.path.exists(dataset_name):
            self.raw_datasets = load_from_disk(dataset_name)
        else:
            self.raw_datasets = load_dataset(dataset_name)

    def get_train_data(self):
        return

    def get_eval_data(self):
        return

    def get_prompt(self, sample):
        return

    def get_chosen(self, sample):
        return

    def get_rejected(self, sample):
        return

    def get_prompt_and_chosen(self, sample):
        return

    def get_prompt_and_rejected(self, sample):
        return


class StaticDataset(PromptRawDataset):
    """None where a text is missing."""

    def __init__(self, output_path, seed, local_rank, dataset_name):
        super().__init__(output_path, seed, local_rank, dataset_name)
        self.dataset_name = "team/static"
        self.dataset_name_clean = "team_static"

    def get_train_data(self):
        return self.raw_datasets["train"]

    def get_eval_data(self):
        return self.raw_datasets["test"]

    def get_prompt(self, sample):
        return sample["prompt"]

    def get_prompt_and_chosen(self, sample):
        if sample["prompt"] is not None and sample["chosen"] is not None:
            return sample["prompt"] + sample["chosen"]
        return None

    def get_prompt_and_rejected(self, sample):
        if sample.get("rejected") is None:
            print(f"Warning: {self.dataset_name} has no rejected answers")
            return None
        return sample["prompt"] + sample["rejected"]


class SharedOutDataset(StaticDataset):
    """Makes its own evaluation part, by an index file as DeepSpeed-Chat's do."""

    def share(self, part):
        path = os.path.join(self.output_path, f"{self.dataset_name_clean}_{self.seed}_{part}.txt")
        if self.local_rank <= 0:
            with open(path, "w") as file:
                file.write("0 1 2" if part == 0 else "3")
        with open(path) as file:
            return Subset(self.raw_datasets["train"], [int(word) for word in file.read().split()])

    def get_train_data(self):
        return self.share(0)

    def get_eval_data(self):
        return self.share(1)
