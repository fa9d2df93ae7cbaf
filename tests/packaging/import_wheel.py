"""Import every module of an installed lazyrag; run by CI where the checkout is not on the path."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MUST = {"lazyrag", "lazyrag_kernels", "llama_index.llms.lazyrag", "langchain_lazyrag"}


def main() -> None:
    """Import them all; print how many there were."""
    distribution = importlib.metadata.distribution("lazyrag")
    files = [Path(file) for file in distribution.files or () if file.suffix == ".py"]
    modules = {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if file.name != "__main__.py"
    }
    missing = MUST - modules
    assert not missing, f"the wheel lacks {sorted(missing)}"
    for name in sorted(modules):
        origin = importlib.import_module(name).__file__
        assert origin is not None, name
        assert CHECKOUT not in Path(origin).resolve().parents, f"{name} came from {origin}"
    print(f"lazyrag {distribution.version}: {len(modules)} modules import")


if __name__ == "__main__":
    main()
