// pybind11 as torch ships it. torch 2.11 closes all its headers but the stable ones to whom names a
// TORCH_TARGET_VERSION, and closes these along with them, though they are not torch's.
#pragma once

#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#pragma pop_macro("TORCH_TARGET_VERSION")
