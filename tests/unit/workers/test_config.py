"""Options of the simulated engine and of the launcher: bounds."""

import pytest

from workers.__main__ import main
from workers.config import SimulateConfig


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["simulate", "--port=70000"], "port: 70000"),
        (["vllm", "--model=m", "--port=70000"], "port: 70000"),
        (["simulate", "--speedup=inf"], "speedup"),
        (["simulate", "--speedup=.inf"], "speedup"),
        (["simulate", "--speedup=.nan"], "speedup"),
        (["simulate", "--speedup=0"], "speedup"),
        (["simulate", "--shutdown_timeout_s=.inf"], "shutdown_timeout_s"),
        (["simulate", "--capacity_blocks=1"], "capacity_blocks: 1"),
        (["simulate", "--max_num_batched_tokens=15"], "max_num_batched_tokens: 15"),
        (["simulate", "--block_size_tokens=20"], "block_size_tokens: 20"),
        (["simulate", "--block_size_tokens=2048"], "block_size_tokens: 2048"),
        (["simulate", "--model_name="], "model_name"),
        (["simulate", '--adapter_names=[""]'], "adapter_names"),
        (["simulate", "--eviction=mru"], "there are lru, fifo, lfu, gdfs, s3_fifo, workload_aware"),
        (["simulate", "--eviction=belady"], "belady needs to know all requests to come"),
    ],
)
def test_value_out_of_bounds_is_named(
    arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and a message that names the option."""
    try:
        status = main(arguments)
    except SystemExit as exit_request:  # what the parser itself finds
        status = int(str(exit_request.code))
    assert status == 2
    assert key in capsys.readouterr().err


def test_bounds_themselves_are_taken() -> None:
    """The least and the greatest of what is allowed."""
    config = SimulateConfig(
        port=65_535, capacity_blocks=2, block_size_tokens=1024, max_num_batched_tokens=1024
    )
    assert config.capacity_blocks == 2
