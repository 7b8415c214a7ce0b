// Products of matrices that allocate their result, and compute nothing: what is left of them is what a GPU's host does
// before it launches one. For tests/support/dry_step.py, which no other program may share a process with.

#include <ATen/ATen.h>
#include <torch/library.h>

namespace {

at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return at::empty({a.size(0), b.size(1)}, a.options()); }

at::Tensor& mm_out(const at::Tensor&, const at::Tensor&, at::Tensor& out) { return out; }

at::Tensor addmm(const at::Tensor&, const at::Tensor& a, const at::Tensor& b, const at::Scalar&, const at::Scalar&) {
  return product(a, b);
}

at::Tensor& addmm_out(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Scalar&, const at::Scalar&,
                      at::Tensor& out) {
  return out;
}

at::Tensor& addmm_(at::Tensor& self, const at::Tensor&, const at::Tensor&, const at::Scalar&, const at::Scalar&) {
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm", product);
  m.impl("mm.out", mm_out);
  m.impl("addmm", addmm);
  m.impl("addmm.out", addmm_out);
  m.impl("addmm_", addmm_);
}
