"""Count what this tree uses that is private in other libraries.

    python -m tests.tools.private_uses

Private is a name or a module with a leading underscore, in code or as a text that names an
attribute; also `Tensor.data`, which swaps a tensor's memory, and code objects, which are bytecode.
Such things change without a word between versions, so `READ_IN` says in which one each was read,
and each new use is added to it by hand.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_USES, MAX_FILES = 150, 40
READ_IN: Mapping[str, str] = {
    "Python 3.11": "__code__ co_freevars co_names dis",
    "peft 0.21.2": "_active_adapter _check_forward_args _did_swap_in_out_features"
    " _disable_adapters",
    "torch 2.13.0": "_C _backward_hooks _backward_pre_hooks _base _buffers _cache_enabled _cdata"
    " _compiled_call_impl _disabled_torch_function_impl _dump_snapshot _dynamo _foreach_mul_"
    " _forward_hooks _forward_pre_hooks _fused_sdp_choice _global _grouped_mm"
    " _local_scalar_dense _make_wrapper_subclass _modules _overloadname _parameters"
    " _post_accumulate_grad_hooks _qualified_op_name _record_memory_history"
    " _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _schema"
    " _set_pg_timeout _set_throw_on_mutable_data_ptr _sleep _softmax _softmax_backward_data"
    " _to_copy _unsafe_view _version data torch._dispatch.python torch._dynamo.exc torch._ops"
    " torch._subclasses.fake_tensor torch.optim._adafactor torch.utils._python_dispatch"
    " torch.utils._pytree",
    "transformers 5.24.0": "_apply_gate _attn_implementation _attn_implementation_internal"
    " _can_record_outputs _experts_implementation _experts_implementation_internal"
    " _get_num_items_in_batch _inner_training_loop _is_expert_parallel _is_hf_initialized"
    " _keys_to_ignore_on_load_missing _loss_function _prepare_input _prepare_inputs _run_epoch"
    " _sliding_window_tensor _supports_default_dynamic_cache _weight_conversions",
}
"""The names by the version of the library that they were read in: their only home."""
_OWN_ROOTS = ("finetune", "offload")
_OF_PYTHON = frozenset({"_exit", "_fields", "_make", "_replace", "_value_"})
_OF_MODULES = frozenset({"_buffers", "_modules", "_parameters"})  # classes of ours have such too
# What `Tensor.data` is not: the section of a recipe, and the memory of an array.
_NOT_TENSORS = ("recipe", "settings", "prepared", "public", "info", "first", "one", "self")
_TEXTS = frozenset({"_bias", "_scales", "_scale_inv", "_truncate", "_indices", "_b", "_t"})


def uses() -> dict[str, Counter[str]]:
    """Return the private names that each file uses, with how often."""
    paths = [p for root in _OWN_ROOTS for p in sorted((ROOT / root).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    own = {path: set(_defined(tree)) for path, tree in trees.items()}
    everywhere = set().union(*own.values())
    found = {
        path: Counter(_private_in(tree, own[path], everywhere)) for path, tree in trees.items()
    }
    return {path: names for path, names in found.items() if names}


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__")


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def _private_in(tree: ast.Module, own: set[str], everywhere: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="data", value=of) if not _is_section_or_array(of):
                yield "data"
            case ast.Attribute(attr=name, value=of):
                known = everywhere if _is_self(of) else own - _OF_MODULES
                is_foreign = _is_private(name) and name not in known | _OF_PYTHON
                yield from [name] if is_foreign or _is_code(name) else []
            case ast.Import(names=names):
                yield from (x.name for x in names if x.name == "dis" or "._" in x.name)
            case ast.ImportFrom(module=str(module), names=names):
                yield from _imported(module, names)
            case ast.Constant(value=str(text)) if text.isidentifier() and _is_private(text):
                yield from {text} - everywhere - _TEXTS


def _imported(module: str, names: list[ast.alias]) -> list[str]:
    if module.split(".")[0] in (*_OWN_ROOTS, "__future__"):
        return []
    return [module if "._" in module else x.name for x in names if "._" in module + f".{x.name}"]


def _is_code(name: str) -> bool:
    return name == "__code__" or name.startswith("co_")


def _is_self(of: ast.expr) -> bool:
    return isinstance(of, ast.Name) and of.id in ("self", "cls")


def _is_section_or_array(of: ast.expr) -> bool:
    text = ast.unparse(of)
    return text.split(".")[-1] in _NOT_TENSORS or text.endswith("numpy()") or text.startswith("np.")


def main() -> None:
    """Show the uses of each file, and of all."""
    found = uses()
    lines = [
        f"{names.total():4} {path}: {', '.join(sorted(names))}" for path, names in found.items()
    ]
    total = sum(names.total() for names in found.values())
    sys.stdout.write("\n".join([*lines, f"{total:4} in {len(found)} files\n"]))


if __name__ == "__main__":
    main()
