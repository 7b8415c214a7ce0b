// Entries of many dicts at once: what decides whether a module tree is still what was looked at
// (fastbert/layers/guard.py). Hundreds of them stand before each text, and none is in a cache any more.
#pragma once

#include "include/pybind.h"

namespace fastbert {

// Of lists of equal length: a dict, a key that is a str, and what was there, None where there was nothing.
bool are_same(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& objects);
bool are_equal(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& values);
// Whether all that is there is None, False or an empty dict.
bool are_false(const pybind11::list& dicts, const pybind11::list& keys);

bool have_types(const pybind11::list& objects, const pybind11::list& types);

}  // namespace fastbert
