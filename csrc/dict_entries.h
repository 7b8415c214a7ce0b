// Entries of many dicts at once: what decides whether a module tree is still what was looked at
// (fastbert/layers/guard.py). Hundreds of them stand before each text, and none is in a cache any more.
//
// A header, though one file includes it: pybind11 takes the compiler three seconds each time.
#pragma once

#include <algorithm>
#include <vector>

#include "include/pybind.h"

namespace fastbert {

// How many entries ahead a dict is fetched, and what it keeps its entries in: each waits for memory, and none for
// another.
constexpr Py_ssize_t kDictAhead = 24, kEntriesAhead = 12;

inline void fetch_entries(PyObject* dict) {
  const auto* of = reinterpret_cast<const PyDictObject*>(dict);
  // An instance's dict has its keys with the others of its class, and values of its own.
  const auto* entries = of->ma_values != nullptr ? reinterpret_cast<const char*>(of->ma_values)
                                                 : reinterpret_cast<const char*>(of->ma_keys);
  for (int line = 0; line < 3; ++line) __builtin_prefetch(entries + 64 * line);
}

// f(entry i) for each, None where there is none, until one is false.
template <typename F>
bool for_all(const pybind11::list& dicts, const pybind11::list& keys, const F& f) {
  const Py_ssize_t count = PyList_GET_SIZE(dicts.ptr());
  const auto dict = [&](Py_ssize_t i) { return PyList_GET_ITEM(dicts.ptr(), i); };
  if (PyList_GET_SIZE(keys.ptr()) != count) throw pybind11::value_error("there is not a key for each dict");
  for (Py_ssize_t i = 0; i < std::min(count, kDictAhead); ++i) __builtin_prefetch(dict(i));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kDictAhead < count) __builtin_prefetch(dict(i + kDictAhead));
    if (i + kEntriesAhead < count) fetch_entries(dict(i + kEntriesAhead));
    if (!PyDict_Check(dict(i))) throw pybind11::type_error("an entry is of no dict");
    PyObject* value = PyDict_GetItemWithError(dict(i), PyList_GET_ITEM(keys.ptr(), i));
    if (value == nullptr) {
      if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
      value = Py_None;
    }
    if (!f(value, i)) return false;
  }
  return true;
}

inline bool is_so(int answer) {
  if (answer < 0) throw pybind11::error_already_set();
  return answer == 1;
}

// Of lists of equal length: a dict, a key that is a str, and what was there, None where there was nothing.
inline bool are_same(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& objects) {
  if (objects.size() != dicts.size()) throw pybind11::value_error("there is not an object for each dict");
  return for_all(dicts, keys,
                 [&](PyObject* value, Py_ssize_t i) { return value == PyList_GET_ITEM(objects.ptr(), i); });
}

inline bool are_equal(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& values) {
  if (values.size() != dicts.size()) throw pybind11::value_error("there is not a value for each dict");
  return for_all(dicts, keys, [&](PyObject* value, Py_ssize_t i) {
    // What is compared may run Python, which may let go of it.
    const auto kept = pybind11::reinterpret_borrow<pybind11::object>(value);
    return is_so(PyObject_RichCompareBool(value, PyList_GET_ITEM(values.ptr(), i), Py_EQ));
  });
}

// Whether all that is there is None, False or an empty dict.
inline bool are_false(const pybind11::list& dicts, const pybind11::list& keys) {
  // Found first, all of them, and then looked at: by then they have come.
  std::vector<PyObject*> all;
  all.reserve(dicts.size());
  for_all(dicts, keys, [&](PyObject* value, Py_ssize_t) {
    __builtin_prefetch(value);
    all.push_back(value);
    return true;
  });
  return std::all_of(all.begin(), all.end(), [](PyObject* value) {
    if (value == Py_None || value == Py_False) return true;
    if (PyDict_CheckExact(value) || PyODict_CheckExact(value)) return PyDict_GET_SIZE(value) == 0;
    return false;  // what else stands in the place of hooks counts as some
  });
}

inline bool have_types(const pybind11::list& objects, const pybind11::list& types) {
  const Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
  if (PyList_GET_SIZE(types.ptr()) != count) throw pybind11::value_error("there is not a type for each object");
  for (Py_ssize_t i = 0; i < count; ++i) __builtin_prefetch(PyList_GET_ITEM(objects.ptr(), i));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto* type = reinterpret_cast<const PyObject*>(Py_TYPE(PyList_GET_ITEM(objects.ptr(), i)));
    if (type != PyList_GET_ITEM(types.ptr(), i)) return false;
  }
  return true;
}

}  // namespace fastbert
