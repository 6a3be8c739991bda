"""Asks one program what it reads in our exports, in an environment that has nothing of ours:

PEERS/trl-1.16/bin/python tests/judges/ask.py TASK.json

TASK: {"ask": names of functions below without ask_, "exports": [{"name", "kind", "folder", "adapter",
"scorer"}], "prompts": conversations, "talks": conversations with their last reply, "worse": the same with a
worse one, "folder": a folder for its own files, "port": a free one}. Prints a JSON line for each question and
export: what was asked, the export's name, and of these what the program shows:

  sent      token ids of each prompt, as the model got them    scores    of each talk, by a reward model
  said      greedy reply to each prompt, 16 tokens at most     loss      mean over the tokens of replies
  logprobs  of each talk, summed over its tokens after the     logps     mean of the replies' sums
            first                                              rewards   of talks that a trainer sampled
  missing   names of weights, also unexpected ones             error     if the program fails
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

NUM_NEW = 16
Answer = dict[str, Any]
Chats = list[list[dict[str, str]]]


def rendered(tokenizer: Any, chats: Chats, *, is_prompt: bool) -> list[list[int]]:
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=is_prompt, return_dict=True) for c in chats]
    return [row["input_ids"] for row in ids]


def padded(tokenizer: Any, rows: list[list[int]], side: str) -> Any:
    tokenizer.padding_side = side
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt")


def load(auto_class: Any, folder: str) -> tuple[Any, Answer]:
    model, info = auto_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    names = [*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])]
    return model.eval(), {"missing": sorted(names)}


@torch.no_grad()
def sum_logprobs(model: Any, tokenizer: Any, talks: Chats) -> list[float]:
    """In one batch, padded on the right."""
    batch = padded(tokenizer, rendered(tokenizer, talks, is_prompt=False), "right")
    logprobs = model(**batch).logits[:, :-1].log_softmax(-1)
    sampled = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (sampled * batch["attention_mask"][:, 1:]).sum(-1).tolist()


@torch.no_grad()
def batch_scores(model: Any, tokenizer: Any, talks: Chats, side: str) -> list[float]:
    return model(**padded(tokenizer, rendered(tokenizer, talks, is_prompt=False), side)).logits[:, 0].tolist()


# ---- transformers and PEFT


def ask_model(export: Answer, task: Answer) -> Answer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(export["folder"])
    if export["kind"] == "reward":
        model, answer = load(transformers.AutoModelForSequenceClassification, export["folder"])
        both = {side: batch_scores(model, tokenizer, task["talks"], side) for side in ("left", "right")}
        return answer | {"scores": both["right"] + both["left"]}
    model, answer = load(transformers.AutoModelForCausalLM, export["folder"])
    sent = rendered(tokenizer, task["prompts"], is_prompt=True)
    return answer | {"sent": sent, "logprobs": sum_logprobs(model, tokenizer, task["talks"])}


def ask_pipeline(export: Answer, task: Answer) -> Answer:
    """With conversations, in a padded batch."""
    if export["kind"] == "reward":
        pipe = transformers.pipeline("text-classification", export["folder"], dtype=torch.float32)
        texts = [pipe.tokenizer.apply_chat_template(talk, tokenize=False) for talk in task["talks"]]
        # BOS stands in the text already.
        outs = pipe(texts, batch_size=len(texts), padding=True, add_special_tokens=False)
        return {"scores": [out["score"] for out in outs]}
    pipe = transformers.pipeline("text-generation", export["folder"], dtype=torch.float32)
    plain, sent = pipe.model.generate, []

    def generate(**kwargs: Any) -> Any:
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"].bool()
        sent.extend(row[kept].tolist() for row, kept in zip(ids, mask, strict=True))
        return plain(**kwargs)

    pipe.model.generate = generate
    chats = task["prompts"]
    outs = pipe(chats, batch_size=len(chats), max_new_tokens=NUM_NEW, do_sample=False)
    return {"sent": sent, "said": [out[0]["generated_text"][-1]["content"] for out in outs]}


def ask_serve(export: Answer, task: Answer) -> Answer | None:
    """By `transformers serve` and OpenAI's client."""
    if export["kind"] == "reward":
        return None
    client = serve(task)
    said = []
    for messages in task["prompts"]:
        options = {"max_tokens": NUM_NEW, "temperature": 0.0, "stream": True}
        chunks = client.chat.completions.create(model=export["folder"], messages=messages, **options)
        said.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    return {"said": said}


def serve(task: Answer) -> Any:
    """A client of a server that is started once."""
    import openai

    if "client" not in task:
        port = str(task["port"])
        program = Path(sys.executable).with_name("transformers")
        log = open(Path(task["folder"], "serve.log"), "w")
        words = [str(program), "serve", "--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
        task["server"] = subprocess.Popen(words, stdout=log, stderr=log)
        task["client"] = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            except OSError:
                assert task["server"].poll() is None, "transformers serve has ended"
                time.sleep(0.2)
    return task["client"]


def ask_peft(export: Answer, task: Answer) -> Answer | None:
    """The adapter, loaded from another working folder, and merged."""
    import peft

    if not export["adapter"]:
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(export["adapter"])
    if export["kind"] == "reward":
        model = peft.AutoPeftModelForSequenceClassification.from_pretrained(export["adapter"], num_labels=1)
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
        model.eval()
        scores = batch_scores(model, tokenizer, task["talks"], "right")
        merged = model.merge_and_unload()
        return {"scores": scores + batch_scores(merged, tokenizer, task["talks"], "right")}
    model = peft.AutoPeftModelForCausalLM.from_pretrained(export["adapter"]).eval()
    logprobs = sum_logprobs(model, tokenizer, task["talks"])
    merged = sum_logprobs(model.merge_and_unload(), tokenizer, task["talks"])
    return {"sent": rendered(tokenizer, task["prompts"], is_prompt=True), "logprobs": logprobs + merged}


# ---- TRL: what a trainer measures before its first step, and two steps


def run_trainer(kind: str, export: Answer, task: Answer, rows: list[Answer], **more: Any) -> Answer:
    """The trainer's evaluation of the rows, in one batch; fails if a step changes nothing."""
    import trl
    from datasets import Dataset

    options = {"output_dir": task["folder"], "report_to": "none", "save_strategy": "no", "use_cpu": True}
    options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": len(rows), "max_steps": 2}
    args = getattr(trl, f"{kind}Config")(**options, bf16=False, learning_rate=1e-3)
    data = Dataset.from_list(rows)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=export["folder"], args=args, train_dataset=data, eval_dataset=data, **more
    )
    measured = trainer.evaluate()
    before = sum_weights(trainer.model)
    trainer.train()
    assert before != sum_weights(trainer.model), "nothing was trained"
    return measured


def sum_weights(model: Any) -> float:
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())


def ask_trl_sft(export: Answer, task: Answer) -> Answer | None:
    if export["kind"] == "reward":
        return None
    rows = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in task["talks"]]
    return {"loss": run_trainer("SFT", export, task, rows)["eval_loss"]}


def pairs(task: Answer) -> list[Answer]:
    both = zip(task["talks"], task["worse"], strict=True)
    return [{"prompt": a[:-1], "chosen": a[-1:], "rejected": b[-1:]} for a, b in both]


def ask_trl_dpo(export: Answer, task: Answer) -> Answer | None:
    if export["kind"] == "reward":
        return None
    return {"logps": run_trainer("DPO", export, task, pairs(task))["eval_logps/chosen"]}


def ask_trl_reward(export: Answer, task: Answer) -> Answer | None:
    if export["kind"] != "reward":
        return None
    return {"mean_score": run_trainer("Reward", export, task, pairs(task))["eval_mean_reward"]}


def ask_trl_grpo(export: Answer, task: Answer) -> Answer | None:
    """A step of an actor with the reward model of the same base."""
    import trl
    from datasets import Dataset

    if export["kind"] != "ppo":
        return None
    talks: Chats = []

    def record(prompts: Chats, completions: Chats, **_: Any) -> list[float]:
        talks.extend(a + b for a, b in zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    options = {"output_dir": task["folder"], "report_to": "none", "save_strategy": "no", "use_cpu": True}
    options |= {"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 2, "logging_steps": 1}
    args = trl.GRPOConfig(**options, bf16=False, max_completion_length=NUM_NEW)
    data = Dataset.from_list([{"prompt": chat} for chat in task["prompts"]])
    trainer = trl.GRPOTrainer(export["folder"], [export["scorer"], record], args=args, train_dataset=data)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    return {"rewards": logs[0]["reward"], "talks": talks}


# ---- lm-evaluation-harness


def ask_lm_eval(export: Answer, task: Answer) -> Answer | None:
    """Questions of one turn, with --apply_chat_template."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    if export["kind"] == "reward":
        return None
    file = Path(task["folder"], "questions.jsonl")
    chats = [chat for chat in task["prompts"] if len(chat) == 1]
    file.write_text("".join(json.dumps({"question": chat[0]["content"]}) + "\n" for chat in chats))
    config = {
        "task": "questions",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "generate_until",
    }
    config |= {"dataset_kwargs": {"data_files": {"test": str(file)}}, "doc_to_text": "{{question}}"}
    config |= {"doc_to_target": "none", "metric_list": [{"metric": "exact_match"}]}
    config |= {"generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": NUM_NEW}}
    model = HFLM(export["folder"], device="cpu", dtype="float32", batch_size=len(chats))
    plain, sent = model._model_generate, []

    def generate(context: Any, *args: Any, **kwargs: Any) -> Any:
        masks = kwargs["attention_mask"].bool()
        sent.extend(row[mask].tolist() for row, mask in zip(context, masks, strict=True))
        return plain(context, *args, **kwargs)

    model._model_generate = generate
    options = {"apply_chat_template": True, "log_samples": True, "bootstrap_iters": 0, "verbosity": "ERROR"}
    options["task_manager"] = TaskManager(include_defaults=False)
    results = lm_eval.simple_evaluate(model, tasks=[config], **options)
    samples = sorted(results["samples"]["questions"], key=lambda sample: sample["doc_id"])
    decode = model.tokenizer.decode
    by_text = {decode(ids): ids for ids in sent}
    texts = [model.tok_encode(sample["arguments"][0][0], add_special_tokens=False) for sample in samples]
    return {"sent": [by_text.get(decode(ids)) for ids in texts], "said": [s["resps"][0][0] for s in samples]}


# ---- Converters


def ask_ctranslate2(export: Answer, task: Answer) -> Answer | None:
    import ctranslate2

    if export["kind"] == "reward":
        return None
    output = Path(task["folder"], "ctranslate2", export["name"].replace(" ", "-"))
    ctranslate2.converters.TransformersConverter(export["folder"]).convert(str(output))
    tokenizer = transformers.AutoTokenizer.from_pretrained(export["folder"])
    generator = ctranslate2.Generator(str(output))
    sent, talks = (rendered(tokenizer, task[key], is_prompt=key == "prompts") for key in ("prompts", "talks"))
    tokens, of_talks = ([tokenizer.convert_ids_to_tokens(row) for row in rows] for rows in (sent, talks))
    outs = generator.generate_batch(tokens, max_length=NUM_NEW, include_prompt_in_result=False)
    said = [tokenizer.decode(out.sequences_ids[0], skip_special_tokens=True) for out in outs]
    logprobs = [sum(result.log_probs) for result in generator.score_batch(of_talks)]
    return {"sent": sent, "said": said, "logprobs": logprobs}


def ask_llama_cpp(export: Answer, task: Answer) -> Answer | None:
    """Converted to GGUF, and run by llama.cpp with the chat template of that file."""
    import llama_cpp

    if export["kind"] == "reward":
        return None
    root = Path(sys.executable).parents[1]
    file = Path(task["folder"], export["name"].replace(" ", "-") + ".gguf")
    words = [str(root / "llama.cpp/convert_hf_to_gguf.py"), export["folder"], "--outtype", "f32"]
    done = subprocess.run([sys.executable, *words, "--outfile", str(file)], capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    model = llama_cpp.Llama(str(file), n_ctx=128, verbose=False)
    sent, said = [], []
    for chat in task["prompts"]:
        out = model.create_chat_completion(chat, temperature=0.0, max_tokens=NUM_NEW)
        sent.append(model.input_ids[: out["usage"]["prompt_tokens"]].tolist())
        said.append(out["choices"][0]["message"]["content"])
    return {"sent": sent, "said": said}


def main() -> None:
    """Ask, and print answers."""
    task = json.loads(Path(sys.argv[1]).read_text())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    packages = ("transformers", "torch", "peft", "trl", "lm_eval", "ctranslate2", "llama_cpp_python")
    for name in task["ask"]:
        for export in task["exports"]:
            try:
                answer = globals()[f"ask_{name}"](export, task)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
            if answer is not None:
                print(json.dumps({"ask": name, "export": export["name"]} | answer), file=out, flush=True)
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except ImportError:
            continue
    print(json.dumps({"versions": installed}), file=out, flush=True)
    if "server" in task:
        task["server"].terminate()


if __name__ == "__main__":
    main()
