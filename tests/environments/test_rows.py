"""Rows from reasoning-gym and from files: what is refused, and that the split holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from colchis.components.config import EnvironmentConfig
from colchis.components.environments import generate_rows, heldout, open_environment, select
from colchis.components.environments.interface import ModelTurn, Prompt
from colchis.components.errors import BadConfig, BadData, ColchisError
from colchis.components.records.iteration import Cursor
from colchis.components.records.rows import Row, Rows, Split

ADAPTER = TypeAdapter(EnvironmentConfig)


def gym(**fields):
    base = {"kind": "reasoning_gym", "task": "chain_sum", "rows": 60, "heldout_rows": 10}
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return ADAPTER.validate_python({**base, "options": options, **fields})


def dataset(path, **fields):
    return ADAPTER.validate_python({"kind": "dataset", "source": f"file:{path}", "heldout_rows": 1, **fields})


def test_reasoning_gym_rows_are_distinct_split_and_reproducible():
    rows = generate_rows(gym(prompt_pattern=r": (.*)$", prompt_template="c{prompt}"))
    assert len({r.prompt for r in rows}) == len(rows)
    assert len(rows.indices(Split.HELDOUT)) == 10
    assert all(r.prompt.startswith("c") and r.prompt.endswith("=") and len(r.prompt) < 12 for r in rows)
    expression = rows[0].prompt.removeprefix("c").removesuffix("=")
    assert eval(expression, {}) == int(rows[0].answer)
    assert generate_rows(gym(prompt_pattern=r": (.*)$", prompt_template="c{prompt}")) == rows
    assert generate_rows(gym(seed=1, prompt_pattern=r": (.*)$")) != rows


def test_library_is_imported_once_without_a_word():
    """Warnings of the library's own source, or a missing pycosat, would end up in every pod's log."""
    code = (
        "import sys\n"
        "import colchis.components.environments\n"
        "assert 'reasoning_gym' not in sys.modules, 'imported before it is needed'\n"
        "from colchis.components.environments.reasoning_gym import library\n"
        "assert library() is library()\n"
        "assert 'pycosat' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reasoning_gym_scores_by_its_own_rule():
    config = gym()
    row = generate_rows(config)[0]
    episode = open_environment(config).start(row, 0)
    assert episode.score() is None
    assert episode.reply(ModelTurn(f" {row.answer}\n", (1,), "stop")) is None
    assert episode.score() == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "nope"}, "environment.task: .*no task 'nope'"),
        ({"options": {"foo": 1}}, "environment.options: task 'chain_sum' cannot use.*foo"),
        ({"options": {"min_terms": 9, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"options": {"size": 5}}, "'size' is set by environment.rows"),
        ({"prompt_pattern": r"(never)"}, "prompt_pattern: .*does not match row 0"),
        ({"heldout_rows": 60}, r"distinct prompts in 60 rows, fewer than heldout_rows \+ 1 = 61"),
        ({"prompt_pattern": r"(State)"}, "same prompt 'State' but different answers"),
    ],
)
def test_reasoning_gym_configuration_that_cannot_work(fields, message):
    with pytest.raises(ColchisError, match=message) as error:
        generate_rows(gym(**fields))
    assert "\n" not in str(error.value)


def test_held_out_prompts_do_not_depend_on_the_order_of_the_file(tmp_path):
    records = [{"prompt": f"q{i}", "answer": str(i), "level": i} for i in range(20)]
    for name, lines in (("a.jsonl", records), ("b.jsonl", records[::-1])):
        (tmp_path / name).write_text("\n".join(json.dumps(r) for r in lines) + "\n\n")
    sets = []
    for name in ("a.jsonl", "b.jsonl"):
        rows = generate_rows(dataset(tmp_path / name, heldout_rows=5), dataset=tmp_path / name)
        sets.append({rows[i].prompt for i in rows.indices(Split.HELDOUT)})
        assert rows[0].metadata == {"level": int(rows[0].answer)}
    assert sets[0] == sets[1]
    assert len(sets[0]) == 5


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    records = [{"q": f"ä{i}", "a": str(i)} for i in range(5)]
    (tmp_path / "x.jsonl").write_text(
        "\n".join(json.dumps(r, ensure_ascii=False) for r in records), encoding="utf-8-sig"
    )
    folder = tmp_path / "part=1"  # a folder that looks like a partition must not become a column
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(records), folder / "x.parquet")
    columns = {"prompt_column": "q", "answer_column": "a", "prompt_template": "<{prompt}>"}
    a = generate_rows(dataset("x.jsonl", **columns), dataset=tmp_path / "x.jsonl")
    b = generate_rows(dataset("x.parquet", **columns), dataset=folder)
    assert a == b
    assert a[0].prompt == "<ä0>"


GOOD = b'{"prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "x.jsonl: has no rows"),
        (b"\xff\xfe\n", "x.jsonl, line 1: not UTF-8"),
        (GOOD + b'{"prompt": "q", \n', "x.jsonl, line 2: not JSON"),
        (GOOD + b"[1]\n", "x.jsonl, line 2: expected an object, found list"),
        (b'{"prompt": "p", "prompt": "q", "answer": "a"}\n', "line 1: not JSON .*'prompt' occurs twice"),
        (b'{"prompt": "p", "answer": "a", "x": NaN}\n', "line 1: not JSON .*NaN"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b'{"answer": "a"}\n', "line 1, column 'prompt': missing, found 'answer'"),
        (b'{"prompt": "p"}\n', "line 1, column 'answer': missing"),
        (b'{"prompt": null, "answer": "a"}\n', "line 1, column 'prompt': is null"),
        (b'{"prompt": "p", "answer": 4}\n', "line 1, column 'answer': expected text, found int 4; quote it"),
        (b'{"prompt": ["p"], "answer": "a"}\n', "column 'prompt': expected text, found list"),
        (b'{"prompt": "  ", "answer": "a"}\n', "column 'prompt': is empty"),
        (b'{"prompt": "p", "answer": ""}\n', "column 'answer': is empty"),
        (b'{"prompt": "\\ud800", "answer": "a"}\n', "column 'prompt': holds a lone surrogate"),
        (GOOD + b'{"prompt": "p", "answer": "b"}\n', "line 2, column 'answer': 'b', but line 1 has the same prompt"),
        (GOOD * 5, "1 distinct prompts in 5 rows, fewer than heldout_rows"),
    ],
)
def test_malformed_jsonl_is_one_line_that_names_file_row_and_column(tmp_path, lines, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines)
    with pytest.raises(ColchisError, match=message) as error:
        generate_rows(dataset(path), dataset=path)
    assert "\n" not in str(error.value)


def test_malformed_parquet_is_refused_by_column(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(BadData, match=r"x.parquet: not a readable Parquet file"):
        generate_rows(dataset(path), dataset=path)
    for table, message in (
        (pa.table({"prompt": ["a", "b"], "answer": [1, 2]}), "column 'answer': expected text, found int64"),
        (pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), "row 2, column 'prompt': is null"),
        (pa.table({"prompt": ["a", "b"]}), "row 1, column 'answer': missing"),
        (pa.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "answer"]), "'answer': occurs twice"),
        (pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), "has no rows"),
    ):
        pq.write_table(table, path)
        with pytest.raises(BadData, match=message):
            generate_rows(dataset(path), dataset=path)


def test_unknown_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,answer\n")
    for path, message in (
        (tmp_path / "x.csv", r"expected a .jsonl or .parquet"),
        (tmp_path / "absent.jsonl", "no such file"),
        (None, "was not given"),
    ):
        with pytest.raises(BadConfig, match=message):
            generate_rows(dataset("x"), dataset=path)
    (tmp_path / "y.csv").write_text("")
    with pytest.raises(BadConfig, match="holds 2 files"):
        generate_rows(dataset("x"), dataset=tmp_path)


def test_own_environment_that_is_not_installed_is_named():
    with pytest.raises(BadConfig, match=r"no entry point 'mine' in the group 'colchis.environments'"):
        open_environment(ADAPTER.validate_python({"kind": "own", "name": "mine"}))


def table(train: int, held: int = 2) -> Rows:
    return Rows(tuple(Row(i, f"p{i}", "a", Split.HELDOUT if i < held else Split.TRAIN) for i in range(train + held)))


def test_prompts_of_an_iteration_are_distinct_and_epochs_reshuffle():
    rows, cursor, seen = table(10), Cursor(), []
    for _ in range(9):
        indices, cursor = select(rows, 7, cursor, 4)
        assert len(set(indices)) == 4
        assert all(rows[i].split is Split.TRAIN for i in indices)
        seen.append(indices)
    assert cursor == Cursor(epoch=4, position=4)
    epochs = [seen[i] + seen[i + 1] for i in (0, 2, 4, 6)]
    assert all(len(set(e)) == 8 for e in epochs), "a prompt came twice in one epoch"
    assert len({tuple(e) for e in epochs}) == 4, "the epochs have the same order"
    assert set().union(*seen) == set(rows.indices(Split.TRAIN)), "a prompt is left out for good"
    assert heldout(rows, 5) == [0, 1]


def test_selection_is_a_function_of_seed_and_cursor():
    """Pinned: a run resumed elsewhere must continue the same permutation."""
    assert select(table(10), 7, Cursor(), 10) == ([10, 5, 6, 9, 3, 7, 8, 11, 2, 4], Cursor(epoch=0, position=10))
    assert select(table(10), 7, Cursor(epoch=1, position=4), 3) == select(table(10), 7, Cursor(epoch=1, position=4), 3)
    assert select(table(10), 7, Cursor(), 10)[0] != select(table(10), 8, Cursor(), 10)[0]


def test_more_prompts_than_rows_is_refused_with_both_numbers():
    with pytest.raises(BadConfig, match="11 per iteration, but the environment has 10 distinct training prompts"):
        select(table(10), 0, Cursor(), 11)


class Offers:
    """An environment whose prompts are given."""

    version = "1"

    def __init__(self, prompts):
        self._prompts = prompts

    def prompts(self):
        return self._prompts

    def start(self, row, seed):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([Prompt("a", split=Split.TRAIN), Prompt("b")], "sets the split of 1 of 2 prompts"),
        ([Prompt("a", split=Split.TRAIN), Prompt("a", split=Split.HELDOUT)], "same prompt 'a' in two splits"),
        ([Prompt("a", split=Split.TRAIN)], "1 training and 0 held-out"),
        ([Prompt("  ")], "row 0: prompt is empty"),
        ([Prompt("a", 3)], "row 0: answer is int, expected text"),
        ([Prompt("a", "x"), Prompt("a", "y")], "rows 0 and 1 have the same prompt 'a' but different answers"),
    ],
)
def test_own_prompts_that_contradict_each_other(monkeypatch, prompts, message):
    from colchis.components.environments import opening

    monkeypatch.setattr(opening, "open_environment", lambda config, dataset=None: Offers(prompts))
    with pytest.raises(ColchisError, match=message):
        generate_rows(ADAPTER.validate_python({"kind": "own", "name": "offers", "heldout_rows": 1}))


def test_own_split_and_metadata_are_kept(monkeypatch):
    from colchis.components.environments import opening

    prompts = [Prompt("a", metadata={"t": (1, 2), "s": {3}}, split=Split.HELDOUT), Prompt("b", split=Split.TRAIN)]
    monkeypatch.setattr(opening, "open_environment", lambda config, dataset=None: Offers(prompts))
    rows = generate_rows(ADAPTER.validate_python({"kind": "own", "name": "offers"}))
    assert [r.split for r in rows] == [Split.HELDOUT, Split.TRAIN]
    assert rows[0].metadata == {"t": [1, 2], "s": [3]}
