// Storages of tensors beside which something is kept for as long as they live: packed weights, gradients' memory.
//
// A storage is known by the address of its memory. Python tells when it goes (fastbert/ops/linear/linear.py), or when
// its memory has become another: torch keeps one Python object for as long as a storage lives.
#pragma once

#include <Python.h>

#include <cstdint>

#include "array.h"

namespace fastbert {

// The first byte of the storage that a tensor, or a view of one, lies in.
const char* storage_of(const Array& t);

// The bytes of that storage.
int64_t storage_bytes(const Array& t);

// Has Python call forget_storage when the storage goes, once for each.
void watch_storage(const Array& t);

// Drops everything that is kept for the storage at this address. Never waits for Python: a finalizer may call it.
void forget_storage(uintptr_t address);

// Made while the library is loaded by what keeps something beside storages: forget_storage calls `forget`, too.
struct KeptBeside {
  explicit KeptBeside(void (*forget)(const void* storage));
};

// Calls the operator fastbert::`name`, whose kernel is Python; what it takes is boxed (register.h). False if it raised.
bool call_python(const char* name, StableIValue* stack);

// Such a kernel did its work, but a signal's handler raised this in it. The main thread raises it when it is in Python
// again. Takes the reference.
void raise_behind_kernel(PyObject* error);

}  // namespace fastbert
