"""`max-build run` under programs of MAX's own: its documentation's, and its pipelines.

Slow: each first run compiles what it needs, minutes of it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
from programs import run_under

pytestmark = pytest.mark.slow

_BLOCK = re.compile(
    r"^( *)\.\. (?:code-block::|invisible-code-block:) python\n((?:\n|\1 +.*\n)+)", re.MULTILINE
)
_EXAMPLES = [
    ("engine/api.py", "InferenceSession"),
    ("graph/graph.py", "Module"),
    ("graph/ops/call.py", "call"),
    ("graph/ops/conditional.py", "cond"),
    ("graph/ops/while_loop.py", "while_loop"),
]
# What a pipeline lacks to be imported is said with this status.
_LACKING = 77

# Writes a model of one layer with random weights as the Hugging Face Hub would hold it.
_MODEL = """
import json, os, pathlib, sys
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from max.driver import DeviceSpec
    from max.pipelines.architectures import register_all_models
    from max.pipelines.lib import PIPELINE_REGISTRY, PipelineArgs, PipelineConfig
    from max.pipelines.modeling.types import PipelineTask
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

folder = pathlib.Path("model").resolve()
folder.mkdir(exist_ok=True)
rng = np.random.default_rng(0)

def store(config, weights, special, tokenizer):
    config = {**config, "torch_dtype": "float32", "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    words = special + [f"w{n}" for n in range(config["vocab_size"] - len(special))]
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token=special[1]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("".join(f"{word}\\n" for word in words))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    made = {n: rng.standard_normal(shape, dtype=np.float32) for n, shape in weights.items()}
    save_file(made, folder / "model.safetensors")

def pipeline(task):
    register_all_models()
    arguments = PipelineArgs(
        model_path=str(folder),
        device_specs=[DeviceSpec.cpu()],
        quantization_encoding="float32",
        max_length=64,
        task=task,
    )
    return PIPELINE_REGISTRY.retrieve(PipelineConfig.from_args(arguments), task=task)
"""

_BERT = """
H, I, V, P = 32, 64, 32, 64
weights = {
    f"embeddings.{kind}_embeddings.weight": (n, H)
    for kind, n in (("word", V), ("position", P), ("token_type", 2))
}
layer = "encoder.layer.0."
for name, shape in {
    "embeddings.LayerNorm": (H,),
    **{f"{layer}attention.self.{one}": (H, H) for one in ("query", "key", "value")},
    f"{layer}attention.output.dense": (H, H),
    f"{layer}attention.output.LayerNorm": (H,),
    f"{layer}intermediate.dense": (I, H),
    f"{layer}output.dense": (H, I),
    f"{layer}output.LayerNorm": (H,),
    "pooler.dense": (H, H),
}.items():
    weights |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
config = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": H, "vocab_size": V,
    "intermediate_size": I, "num_attention_heads": 2, "max_position_embeddings": P,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
}
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
store(config, weights, special, {"tokenizer_class": "BertTokenizer"})
_, embed = pipeline(PipelineTask.EMBEDDINGS_GENERATION)
ids, mask = np.array([[2, 5, 6, 3]]), np.ones((1, 4), np.float32)
print(embed._pipeline_model.model.execute(ids, mask)[0].to_numpy().tolist())
"""


def example(file: str, name: str) -> str:
    """The program in a docstring of the MAX that is installed, with the checks it hides."""
    spec = importlib.util.find_spec("max")
    assert spec is not None
    assert spec.submodule_search_locations
    tree = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    (node,) = (
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name
    )
    blocks = _BLOCK.findall((ast.get_docstring(node) or "") + "\n")
    assert blocks, f"{name} has no example any more"
    return "\n".join(textwrap.dedent(block) for _, block in blocks)


def test_the_examples_of_maxs_documentation(tmp_path: Path) -> None:
    code = "".join(f"exec({example(*one)!r}, {{}})\n" for one in _EXAMPLES)
    first = run_under(tmp_path, code)
    assert first.returncode == 0, first.stderr
    assert " compiled" in first.stderr
    second = run_under(tmp_path, code)
    assert second.returncode == 0, second.stderr
    found = re.search(r"^max-build: (\d+) cached$", second.stderr, re.MULTILINE)
    assert found is not None, second.stderr
    assert int(found[1]) >= len(_EXAMPLES)


@pytest.mark.parametrize(("program", "graphs"), [(_BERT, 1)], ids=["bert"])
def test_a_pipelines_architecture_on_random_weights(
    tmp_path: Path, program: str, graphs: int
) -> None:
    first = run_under(tmp_path, _MODEL + program)
    if first.returncode == _LACKING:
        pytest.skip(f"`max.pipelines` cannot be imported: {first.stderr.splitlines()[0]}")
    assert first.returncode == 0, first.stderr
    assert f"max-build: {graphs} compiled\n" in first.stderr
    second = run_under(tmp_path, _MODEL + program)
    assert second.returncode == 0, second.stderr
    assert f"max-build: {graphs} cached\n" in second.stderr
    assert second.stdout == first.stdout
