#include "storages.h"

#include <atomic>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "register.h"

namespace fastbert {
namespace {

std::mutex mutex;

std::unordered_set<const void*>& watched() {
  // Never destroyed: at exit tensors may go after static objects.
  static auto* storages = new std::unordered_set<const void*>();
  return *storages;
}

// Whom to tell; complete before the first tensor comes.
std::vector<void (*)(const void*)>& keepers() {
  static auto* list = new std::vector<void (*)(const void*)>();
  return *list;
}

std::atomic<PyObject*> raised = nullptr;

// A pending call of Python's.
int raise_pending(void*) {
  PyObject* const error = raised.exchange(nullptr);
  if (error == nullptr) return 0;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return -1;
}

}  // namespace

const char* storage_of(const Array& t) {
  const void* data = t.data();
  int64_t offset = 0;
  if (t.is_view()) call(torch_get_const_data_ptr(t.handle(), &data), "data_ptr");
  call(aoti_torch_get_storage_offset(t.handle(), &offset), "storage_offset");
  return static_cast<const char*>(data) - offset * t.element_size();
}

int64_t storage_bytes(const Array& t) {
  int64_t bytes = 0;
  call(aoti_torch_get_storage_size(t.handle(), &bytes), "a storage's size");
  return bytes;
}

void watch_storage(const Array& t) {
  const char* const storage = storage_of(t);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!watched().insert(storage).second) return;
  }
  StableIValue stack[] = {torch::stable::detail::from(new_handle(t.handle()))};
  if (call_python("fastbert::watch_storage_cpu", stack)) return;
  forget_storage(reinterpret_cast<uintptr_t>(storage));
  fail("a weight's storage could not be watched");
}

void forget_storage(uintptr_t address) {
  const auto* const storage = reinterpret_cast<const void*>(address);
  for (const auto forget : keepers()) forget(storage);
  const std::lock_guard<std::mutex> lock(mutex);
  watched().erase(storage);
}

KeptBeside::KeptBeside(void (*forget)(const void* storage)) { keepers().push_back(forget); }

bool call_python(const char* name, StableIValue* stack) {
  const bool done = torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION) == 0;
  if (raised) Py_AddPendingCall(raise_pending, nullptr);
  return done;
}

void raise_behind_kernel(PyObject* error) { Py_XDECREF(raised.exchange(error)); }

}  // namespace fastbert
