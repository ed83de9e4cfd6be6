"""A model in several files, as gguf-split writes them."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def split(source: Path, out: Path, tensors_max: int) -> list[Path]:
    """Write `source` in files of so many tensors, named after `out`; returns their paths."""
    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, arch, split_max_tensors=tensors_max)
    for name, item in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = item.types[-1] if item.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, item.contents(), item.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(out.parent.glob(f"{out.stem}-*-of-*.gguf"))
