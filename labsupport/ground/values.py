"""What an arm returns, as data: a tree of plain values for msgpack, and the bytes of its arrays beside it.

Nothing in this format can run code where it is read. Numbers, text, bytes, arrays and list, tuple, dict and set of
them come back as they were; a NumPy array of objects, a DataFrame or an instance of somebody's class does not.
"""

import numpy as np

_KINDS = "biufcSUMm"  # of NumPy's dtypes: those whose bytes are the whole value (numpy.dtype.kind)
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DEEPEST = 100  # a list that holds itself would have no end


class NoValue(TypeError):
    """What cannot come back; the message says what and where."""


def as_bytes(text):
    """A text's bytes, also one with surrogates, for which UTF-8 has none."""
    return text.encode("utf-8", "surrogatepass")


def as_text(whole):
    """The text that as_bytes() was given."""
    return whole.decode("utf-8", "surrogatepass")


def pack(value):
    """(tree, [array of bytes]) of a value. Raises NoValue."""
    buffers = []
    return _pack(value, buffers, "its return value", 0), buffers


def _pack(value, buffers, where, depth):
    if depth > _DEEPEST:
        raise NoValue(f"{where[:60]}… is nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, (bool, float)) and type(value) in (bool, float):
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else ["int", str(value)]
    if isinstance(value, str):
        return ["text", as_bytes(str(value))]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if type(value) is complex:
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        items = [
            [_pack(k, buffers, f"a key of {where}", depth + 1), _pack(v, buffers, f"{where}[{k!r:.40}]", depth + 1)]
            for k, v in value.items()
        ]
        return ["dict", items]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [_pack(item, buffers, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]]
    if type(value).__module__.split(".")[0] in ("tensorflow", "keras") and hasattr(value, "numpy"):
        value = np.asarray(value.numpy())  # a tensor or a variable: its numbers
    if isinstance(value, (np.ndarray, np.generic)):
        return _pack_array(value, buffers, where)
    raise NoValue(f"{where} is a {type(value).__name__}")


def _pack_array(value, buffers, where):
    array = np.asarray(value)
    extension = array.dtype.kind == "V" and array.dtype.fields is None  # bfloat16 and its like, by their name
    if array.dtype.kind not in _KINDS and not (extension and array.dtype.name != "void"):
        raise NoValue(f"{where} is an array of {array.dtype}")
    dtype = array.dtype.name if extension else array.dtype.str
    buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return ["array" if isinstance(value, np.ndarray) else "scalar", dtype, list(array.shape), len(buffers) - 1]


def unpack(tree, buffers):
    """The value of a tree and its buffers. Raises NoValue for what pack() does not make."""
    try:
        return _unpack(tree, buffers)
    except NoValue:
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise NoValue(f"its return value came back damaged ({error})") from None


def _unpack(tree, buffers):
    if not isinstance(tree, list):
        return tree
    kind, *parts = tree
    if kind == "int":
        return int(parts[0])
    if kind == "text":
        return as_text(parts[0])
    if kind == "complex":
        return complex(*parts)
    if kind == "dict":
        return {_unpack(key, buffers): _unpack(value, buffers) for key, value in parts[0]}
    if kind in ("array", "scalar"):
        dtype, shape, index = parts
        array = buffers[index].view(_dtype(dtype)).reshape(shape)
        return array if kind == "array" else array[()]
    return _CONTAINERS[kind](_unpack(item, buffers) for item in parts[0])


def _dtype(name):
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its like; comes with TensorFlow

        return np.dtype(getattr(ml_dtypes, name))
