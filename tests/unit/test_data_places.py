"""Where rows lie: copies of hub data sets and their configurations, the hub's cache offline, Arrow files."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stage_texts

from common.data.data_options import DataOptions
from common.data.raw_rows import RawRows
from common.data.registry import load_source
from step1_sft.arguments import SFTArguments

datasets = pytest.importorskip("datasets")

CONFIGS = """---
license: mit
configs:
- config_name: {}
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/held-*
- config_name: {}
  data_files:
  - split: train
    path: more/*
---
# A data set
"""


def rows(word, count=2):
    return [{"prompt": f"{word} {n}", "answer": "a"} for n in range(count)]


def write_parquet(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(content), path)


def prompts(part):
    return [part[i]["prompt"] for i in range(len(part))]


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def copy(tmp_path):
    """A downloaded hub data set: two shards to train on, one file held out."""
    folder = tmp_path / "owner" / "name"
    for shard in (0, 1):
        write_parquet(folder / f"data/train-0000{shard}-of-00002.parquet", rows(f"shard {shard}"))
    write_parquet(folder / "data/test-00000-of-00001.parquet", rows("test", 1))
    return folder


def test_a_downloaded_hub_folder(copy, capfd):
    source = load_source(str(copy))
    assert prompts(source.train) == ["shard 0 0", "shard 0 1", "shard 1 0", "shard 1 1"]
    assert prompts(source.eval) == ["test 0"]
    assert capfd.readouterr() == ("", "")
    before = source.digest()
    assert load_source(str(copy)).digest() == before
    write_parquet(copy / "data/train-00001-of-00002.parquet", rows("other"))
    assert load_source(str(copy)).digest() != before


def test_the_layout_of_the_hubs_parquet_copy(tmp_path):
    for split in ("train", "validation"):
        write_parquet(tmp_path / f"set/default/{split}/0000.parquet", rows(split))
    source = load_source(str(tmp_path / "set/default"))
    assert (prompts(source.train)[0], prompts(source.eval)[0]) == ("train 0", "validation 0")
    assert len(load_source(str(tmp_path / "set")).train) == 2


def test_configurations_of_a_folder_are_named(copy, monkeypatch):
    (copy / "README.md").write_text(CONFIGS.format("main", "extra"))
    os.rename(copy / "data/test-00000-of-00001.parquet", copy / "data/held-00000-of-00001.parquet")
    write_parquet(copy / "more/a.parquet", rows("more", 3))
    monkeypatch.chdir(copy.parent)
    with pytest.raises(ValueError, match="several configurations; give name:main, name:extra") as raised:
        len(load_source("name").train)
    cures = str(raised.value).split("give ")[1].split(", ")
    sizes = [(len(source.train), len(source.eval or [])) for source in map(load_source, cures)]
    assert sizes == [(4, 1), (3, 0)]
    assert load_source("name:main").digest() != load_source("name:extra").digest()
    with pytest.raises(ValueError, match="--data_path name: .*'third' not found.*main"):
        len(load_source("name:third").train)


def test_one_configuration_is_read_whatever_lies_beside_it(copy):
    (copy / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: more/*\n---\n")
    write_parquet(copy / "more/a.parquet", rows("more"))
    write_parquet(copy / "train.parquet", rows("not this"))
    assert prompts(load_source(str(copy)).train) == ["more 0", "more 1"]


def test_the_hubs_cache_offline(copy, tmp_path, monkeypatch):
    """What `hf download` left there, by the data set's name and by the folder itself."""
    place = tmp_path / "hub" / "datasets--owner--set"
    (place / "snapshots").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text("abc123")
    os.rename(copy, place / "snapshots/abc123")
    for name in ("owner/set", str(place), str(place / "snapshots/abc123")):
        source = load_source(name)
        assert (len(source.train), len(source.eval)) == (4, 1), name
    files = place / "snapshots/abc123/data"
    os.rename(files / "test-00000-of-00001.parquet", files / "held-00000-of-00001.parquet")
    (place / "snapshots/abc123/README.md").write_text(CONFIGS.format("main", "extra"))
    with pytest.raises(ValueError, match="give owner/set:main, owner/set:extra"):
        len(load_source("owner/set").train)
    assert len(load_source("owner/set:main").train) == 4
    with pytest.raises(ValueError, match="--data_path owner/other: .*check the name and the network"):
        len(load_source("owner/other").train)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_files(tmp_path, kind):
    path = tmp_path / "rows.arrow"
    table = pa.Table.from_pylist(rows("arrow", 5))
    open_writer = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with open_writer(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    source = load_source(str(path), max_rows=4)
    assert prompts(source.train) == [f"arrow {n}" for n in range(4)]
    assert source.train.row_id(3, {}) == "rows.arrow:4" and isinstance(source.train, RawRows)


def test_a_folder_of_the_cache_of_datasets(tmp_path):
    saved = datasets.Dataset.from_list(rows("cached"))
    saved.to_parquet(tmp_path / "rows.parquet")
    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train")
    (file,) = loaded.cache_files
    folder, _ = os.path.split(file["filename"])
    assert prompts(load_source(folder).train) == ["cached 0", "cached 1"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.arrow", b"ARROW1 but no more", "cannot be read as .arrow"),
        ("a.arrow", b"", "cannot be read as .arrow"),
        ("a.txt", b"a text\n", r'unknown.*lines of JSON, such as \{"text": "..."\}, in a .jsonl file'),
        ("sub/other.parquet", b"no parquet", "it could not be loaded .*; name a file in it"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, reason):
    path = tmp_path / "folder" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)--data_path {tmp_path}.*{reason}"):
        len(load_source(str(path if name.startswith("a.") else tmp_path / "folder")).train)


def test_the_cure_for_a_folder_without_a_file_to_train_on(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(
        ValueError, match="no train.*found other.jsonl; name a file itself, or rename it to train"
    ):
        len(load_source(str(tmp_path)).train)
    assert len(load_source(str(tmp_path / "other.jsonl")).train) == 1
    os.rename(tmp_path / "other.jsonl", tmp_path / "train.jsonl")
    assert len(load_source(str(tmp_path)).train) == 1


def test_a_link_to_itself_is_no_file(tmp_path):
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match=r"--data_path .*loop.jsonl: there is no such file"):
        load_source(str(loop))


def test_data_split_default(tmp_path, tiny_tokenizer):
    """All rows of a given source, a share of the default data set; a share is named."""
    rows = [{"prompt": f"q {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(150)]
    path = stage_texts.write_rows(tmp_path / "rows.jsonl", rows)
    for split, num_rows in (("", 150), ("2,4,4", 30)):
        data = stage_texts.build(path, 1, tiny_tokenizer, tmp_path, data_split=split, eval_fraction=0.0)
        assert data.report.num_raw_rows == num_rows
        notes = [note for note in data.report.notes if "of its 150 rows, step 1's share" in note]
        assert len(notes) == (num_rows < 150)
    of_default = DataOptions.of(SFTArguments(model_name_or_path="m"), 1)
    assert of_default.data_path == ["Dahoas/rm-static"] and of_default.data_split == "2,4,4"
    assert DataOptions.of(SFTArguments(model_name_or_path="m", data_path=[path]), 1).data_split == ""
