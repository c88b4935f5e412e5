"""The curve of trackers' files: Trackio 0.43.0 and W&B 0.31.0 wrote those in trackers/, by this formula."""

import gzip
import json
import random
import sqlite3
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.logs import pairs, reading_of, readings_of, start_of

from trainer.config import ConfigError
from trainer.scaling.reading.trackers import WANDB_BLOCK, wandb

FOLDER = Path(__file__).parent / "trackers"
STEPS = range(13)  # four a GPU-hour


def reward(step: int, seed: int) -> float:
    """A sigmoid from .2 to .8 and an error, as it was logged."""
    c = step / 4
    noise = random.Random(f"{c}{seed}").gauss(0, 0.01) if c else 0.0
    return 0.2 + (0.6 / (1 + c**-1.5) if c else 0.0) + noise


def expected(seed: int, steps: Sequence[int] = STEPS) -> list[tuple[float, float]]:
    return [(step / 4, reward(step, seed)) for step in steps[1:]]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "sigmoid-rl.db"
    path.write_bytes(gzip.decompress((FOLDER / "trackio.db.gz").read_bytes()))
    return path


def test_trackios_runs_are_curves_and_a_resumed_one_has_its_later_steps(database: Path) -> None:
    scalerl = reading_of(database / "scalerl")
    assert pairs(scalerl.curve) == expected(seed=1) and start_of(scalerl.curve) == 0.2
    assert {p.pass_rate_se for p in scalerl.curve.points} == {0.01}
    grpo, other = readings_of(database)
    assert pairs(other.curve) == pairs(scalerl.curve) and grpo.curve.name.endswith("grpo")
    later = [(step / 4, reward(step, 5)) for step in range(10, 14)]  # made by the resumed run
    assert pairs(grpo.curve) == expected(0, range(10)) + later


def test_names_that_two_runs_share_are_told_apart_and_old_databases_have_no_ids(tmp_path: Path) -> None:
    for ids in (True, False):
        path = tmp_path / f"{ids}.db"
        with sqlite3.connect(path) as database:
            database.execute(
                f"CREATE TABLE metrics (id INTEGER PRIMARY KEY, {'run_id TEXT,' * ids} "
                "timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
            )
            for step in range(6):
                for run in ("aaaaaaa1", "bbbbbbb2")[: 1 + ids]:
                    values = json.dumps(
                        {"eval/pass_rate": 0.1 * step, "gpu_hours": step, "x": {"_type": "t"}}
                    )
                    row = [*([run] if ids else []), f"2026-01-01T00:00:0{step}+00:00", "demo", step, values]
                    marks = ", ".join("?" * len(row))
                    database.execute(f"INSERT INTO metrics VALUES (NULL, {marks})", row)
        database.close()
        names = [reading.curve.name.rpartition(" ")[2] for reading in readings_of(path)]
        assert names == (["demo-aaaaaa", "demo-bbbbbb"] if ids else [str(path)])


def test_wandbs_file_is_the_history_of_its_run(tmp_path: Path) -> None:
    reading = reading_of(FOLDER / "grpo.wandb")
    assert pairs(reading.curve) == expected(seed=0) and start_of(reading.curve) == 0.2
    rows = wandb(FOLDER / "grpo.wandb")
    assert [row["nested/x"] for row in rows] == list(STEPS) and rows[0]["text"] == "a"
    folders = [tmp_path / "wandb" / f"offline-run-{i}" for i in (1, 2)]
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / f"run-{i}.wandb").write_bytes((FOLDER / "grpo.wandb").read_bytes())
    (tmp_path / "wandb" / "latest-run").symlink_to(folders[1])
    assert len(readings_of(tmp_path)) == 2


def test_a_resumed_wandb_run_has_the_rows_of_all_its_files_and_an_empty_file_is_noted(tmp_path: Path) -> None:
    starts = ("run-20260101_090000-abc", "offline-run-20260101_100000-abc", "run-20260101_110000-abc")
    for folder, steps in zip(starts, (range(5), range(3, 6), ()), strict=True):
        rows = [{"step": s, "eval/pass_rate": s / 10 + 0.01 * (steps[0] > 0)} for s in steps]
        items = [[field(1, k.encode()) + field(16, str(v).encode()) for k, v in row.items()] for row in rows]
        records = [field(2, b"".join(field(1, item) for item in row)) for row in items]
        (tmp_path / folder).mkdir()
        content = log(records) if records else b""
        (tmp_path / folder / "run-abc.wandb").write_bytes(content)
    reading = reading_of(tmp_path)
    rewards = [(p.step, round(p.pass_rate, 2)) for p in reading.curve.evaluations]
    assert rewards == [(0, 0), (1, 0.1), (2, 0.2), (3, 0.31), (4, 0.41), (5, 0.51)]  # later files count
    assert any("without a byte" in note and "'run-abc.wandb'" in note for note in reading.notes)
    assert any("Steps 3 to 4 were made twice" in note for note in reading.notes)
    for folder in starts[:2]:
        (tmp_path / folder / "run-abc.wandb").write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        reading_of(tmp_path)


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    content, kind = (value, 0) if isinstance(value, int) else (len(value), 2)
    parts, tag = b"", number << 3 | kind
    for integer in (tag, content):
        while integer > 127:
            parts, integer = parts + bytes([integer & 127 | 128]), integer >> 7
        parts += bytes([integer])
    return parts + (value if isinstance(value, bytes) else b"")


def log(records: Sequence[bytes]) -> bytes:
    """LevelDB's log format, as it is documented: a block is 32 KiB, and a record may be in several."""
    data = b":W&B\xe1\xbe\x00"
    for record in records:
        first = True
        while first or record:
            room = WANDB_BLOCK - len(data) % WANDB_BLOCK
            if room < 7:
                data += b"\0" * room
                continue
            part, record = record[: room - 7], record[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not record]
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    return data


def test_records_over_several_blocks_and_every_kind_of_value_are_read(tmp_path: Path) -> None:
    long = "é" * 50_000  # four blocks
    items = [
        field(1, b"whole") + field(5, 13),  # zigzag: 13 is -7
        field(2, b"outer") + field(2, b"inner") + field(16, b"2.5"),
        field(1, b"text") + field(7, long.encode()),
        field(1, b"real") + b"\x31" + struct.pack("<d", 0.25),
        field(1, b"none") + field(3, 0),
    ]
    history = field(1, 7) + field(2, b"".join(field(1, item) for item in items))
    filler = [
        field(1, 3) + field(9, b"x" * n) for n in (32_740, 3, 32_725)
    ]  # a header that just fits, or not
    path = tmp_path / "run.wandb"
    path.write_bytes(log([*filler, history, *filler, history]))
    row = {"whole": -7, "outer/inner": 2.5, "text": long, "real": 0.25}
    assert wandb(path) == [row, row]


def test_a_file_is_read_up_to_where_it_is_damaged_or_cut(tmp_path: Path) -> None:
    whole, path = (FOLDER / "grpo.wandb").read_bytes(), tmp_path / "run.wandb"
    steps = [row["step"] for row in wandb(FOLDER / "grpo.wandb")]
    for damaged in (whole[:4000], whole[:4000] + bytes([whole[4000] ^ 1]) + whole[4001:]):
        path.write_bytes(damaged)
        read = [row["step"] for row in wandb(path)]
        assert 3 < len(read) < 12 and read == steps[: len(read)]


@pytest.mark.parametrize("name", ["x.db", "x.sqlite", "x.wandb"])
@pytest.mark.parametrize("content", [b"", b"nothing of the kind" * 99, log([field(2, field(1, b"\xff"))])])
def test_what_is_none_of_them_is_refused_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.\w+") as error:
        reading_of(tmp_path / name)
    assert "\n" not in str(error.value)


DEEP = "[" * 200_000
TIME = "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("timestamp, run_name, step, metrics", [TIME, "a", None, '{"x": 1}']),
        ("timestamp, run_name, step, metrics", [None, "a", 1, '{"x": 1}']),
        ("timestamp, run_name, step, metrics", [TIME, "a", 1, None]),
        ("timestamp, run_name, step, metrics", [TIME, "a", 1, "[1]"]),
        ("timestamp, run_name, step, metrics", [TIME, "a", 1, '"x"']),
        ("timestamp, run_name, step, metrics", [TIME, "a", 1, '{"x": ' + DEEP]),
        ("timestamp, run_name, step, metrics", [TIME, "a", float("inf"), '{"x": 1}']),
        ("timestamp, run_name, step, scores", [TIME, "a", 1, '{"x": 1}']),
    ],
)
def test_a_damaged_database_is_refused_in_one_line(
    columns: str, row: Sequence[object], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "x.db") as database:
        database.execute(f"CREATE TABLE metrics (id INTEGER PRIMARY KEY, {columns})")
        database.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?)", row)
    database.close()
    with pytest.raises(ConfigError, match=r"x\.db: not the rows that Trackio writes, or damaged") as error:
        reading_of(tmp_path / "x.db")
    assert "\n" not in str(error.value)


def test_json_that_is_nested_too_deep_is_refused_in_one_line(tmp_path: Path) -> None:
    item = field(1, b"x") + field(16, DEEP.encode())
    (tmp_path / "x.wandb").write_bytes(log([field(2, field(1, item))]))
    (tmp_path / "x.jsonl").write_text(DEEP + "\n")
    for name, why in (("x.wandb", "not a history of W&B"), ("x.jsonl", "recursion")):
        with pytest.raises(ConfigError, match=rf"{name}: .*{why}"):
            reading_of(tmp_path / name)
