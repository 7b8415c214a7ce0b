// The extension module: the CPU kernels of the schemas in fastbert/ops/*.py, and the choice of ISA.

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "dict_entries.h"
#include "include/isa.h"
#include "include/pybind.h"
#include "ops/adamw.h"
#include "ops/attention.h"
#include "ops/attention_relative.h"
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/encoder.h"
#include "ops/encoder_layers_training.h"
#include "ops/encoder_layers.h"
#include "ops/feed_forward.h"
#include "ops/layer_norm.h"
#include "ops/linear.h"
#include "ops/maxsim.h"
#include "ops/normalize.h"
#include "ops/packed_only.h"
#include "ops/packed_weights.h"
#include "ops/pooling.h"
#include "ops/register.h"
#include "ops/storages.h"
#include "ops/workspace.h"

STABLE_TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("attention_fwd_cpu", fastbert::boxed_operator<&fastbert::attention_fwd_operator>);
  m.impl("attention_bwd_cpu", fastbert::boxed_operator<&fastbert::attention_bwd_operator>);
  m.impl("attention_relative_fwd_cpu", fastbert::boxed_operator<&fastbert::attention_relative_fwd_operator>);
  m.impl("attention_relative_bwd_cpu", fastbert::boxed_operator<&fastbert::attention_relative_bwd_operator>);
  m.impl("add_layer_norm_fwd_cpu", fastbert::boxed_operator<&fastbert::add_layer_norm_fwd_cpu>);
  m.impl("add_layer_norm_bwd_cpu", fastbert::boxed_operator<&fastbert::add_layer_norm_bwd_cpu>);
  m.impl("adamw_cpu", fastbert::boxed_operator<&fastbert::adamw_cpu>);
  m.impl("adamw_deferred_cpu", fastbert::boxed_operator<&fastbert::adamw_deferred_cpu>);
  m.impl("dropout_cpu", fastbert::boxed_operator<&fastbert::dropout_cpu>);
  m.impl("embed_fwd_cpu", fastbert::boxed_operator<&fastbert::embed_fwd_cpu>);
  m.impl("embed_bwd_cpu", fastbert::boxed_operator<&fastbert::embed_bwd_cpu>);
  m.impl("encoder_cpu", fastbert::boxed_operator<&fastbert::encoder_cpu>);
  m.impl("encoder_layers_fwd_cpu", fastbert::boxed_operator<&fastbert::encoder_layers_fwd_cpu>);
  m.impl("encoder_layers_bwd_cpu", fastbert::boxed_operator<&fastbert::encoder_layers_bwd_cpu>);
  m.impl("encoder_layers_cpu", fastbert::boxed_operator<&fastbert::encoder_layers_cpu>);
  m.impl("hold_encoder_cpu", fastbert::boxed_operator<&fastbert::hold_encoder_cpu>);
  m.impl("linear_cpu", fastbert::boxed_operator<&fastbert::linear_cpu>);
  m.impl("linear_bwd_cpu", fastbert::boxed_operator<&fastbert::linear_bwd_cpu>);
  m.impl("feed_forward_bwd_cpu", fastbert::boxed_operator<&fastbert::feed_forward_bwd_cpu>);
  m.impl("feed_forward_cpu", fastbert::boxed_operator<&fastbert::feed_forward_cpu>);
  m.impl("maxsim_bwd_cpu", fastbert::boxed_operator<&fastbert::maxsim_bwd_cpu>);
  m.impl("maxsim_fwd_cpu", fastbert::boxed_operator<&fastbert::maxsim_fwd_cpu>);
  m.impl("normalize_cpu", fastbert::boxed_operator<&fastbert::normalize_cpu>);
  m.impl("pack_only_cpu", fastbert::boxed_operator<&fastbert::pack_only_cpu>);
  m.impl("pooling_bwd_cpu", fastbert::boxed_operator<&fastbert::pooling_bwd_cpu>);
  m.impl("pooling_fwd_cpu", fastbert::boxed_operator<&fastbert::pooling_fwd_cpu>);
}

namespace {

std::string isa() { return fastbert::kIsaNames[static_cast<size_t>(fastbert::current_isa().load())]; }

std::vector<std::string> isas_that(bool (*holds)(fastbert::Isa)) {
  std::vector<std::string> names;
  for (size_t i = 0; i < fastbert::kIsaNames.size(); ++i) {
    if (holds(static_cast<fastbert::Isa>(i))) names.emplace_back(fastbert::kIsaNames[i]);
  }
  return names;
}

std::vector<std::string> isas() {
  return isas_that([](fastbert::Isa isa) { return fastbert::is_built(isa) && fastbert::can_run(isa); });
}

std::vector<std::string> machine_isas() { return isas_that(&fastbert::can_run); }

void set_isa(const std::string& name) {
  const auto& names = fastbert::kIsaNames;
  const auto named = std::find(names.begin(), names.end(), name);
  const auto isa = static_cast<fastbert::Isa>(named - names.begin());
  if (named != names.end() && fastbert::can_run(isa)) {
    if (fastbert::is_built(isa)) return fastbert::current_isa().store(isa);
    throw std::invalid_argument("this build has no kernels for ISA '" + name +
                                "', which this machine can run: `fastbert build` makes one with all of them");
  }
  std::string known;
  for (const std::string& one : isas()) known += (known.empty() ? "" : ", ") + one;
  throw std::invalid_argument("this machine cannot run ISA '" + name + "'; it can run: " + known);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#if defined(FASTBERT_WITH_CUDA)
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def("isa", &isa, "The instruction set that the CPU kernels run with: cpuid's choice, unless set_isa changed it.");
  m.def("isas", &isas, "The instruction sets that this machine can run and this build has, narrowest first.");
  m.def("machine_isas", &machine_isas, "The same with those that this build has no kernels for.");
  m.def("are_same", &fastbert::are_same, pybind11::arg("dicts"), pybind11::arg("keys"), pybind11::arg("objects"),
        "Whether the dicts have these very objects at the keys; None stands for nothing there.");
  m.def("are_equal", &fastbert::are_equal, pybind11::arg("dicts"), pybind11::arg("keys"), pybind11::arg("values"),
        "Whether the dicts have equal values at the keys.");
  m.def("are_false", &fastbert::are_false, pybind11::arg("dicts"), pybind11::arg("keys"),
        "Whether all that the dicts have at the keys is false.");
  m.def("have_types", &fastbert::have_types, pybind11::arg("objects"), pybind11::arg("types"),
        "Whether the objects are of these very types.");
  m.def("packed_bytes", &fastbert::packed_bytes, "Bytes of all packed copies of weights that are kept.");
  m.def("forget_encoder", &fastbert::forget_encoder, pybind11::arg("encoder"),
        "Let go of the tensors of an encoder that hold_encoder_cpu has given this number.");
  m.def("forget_storage", &fastbert::forget_storage, pybind11::arg("storage"),
        "Drop all that is kept for the storage with this address, untyped_storage().data_ptr(): it is about to go.");
  m.def(
      "raise_behind_kernel", [](pybind11::object error) { fastbert::raise_behind_kernel(error.release().ptr()); },
      pybind11::arg("error"), "Raise this in the main thread once the kernel that has called Python is done.");
  m.def("repack", &fastbert::repack, pybind11::arg("storages"),
        "Drop the packed copies of these storages' weights: the next call packs them anew.");
  m.def("weights_changed", &fastbert::weights_changed, pybind11::arg("storages"),
        "The next call packs these storages' weights anew, into the memory that is there.");
  m.def("only_recorded_writes", &fastbert::only_recorded_writes,
        "Whether somebody says that torch records every write to a weight; of the calling thread.");
  m.def("set_only_recorded_writes", &fastbert::set_only_recorded_writes, pybind11::arg("only"),
        "Whether to believe that torch records every write, and to compare a share of each weight at a call, not all.");
  m.def("fill_memory", &fastbert::fill_memory, pybind11::arg("fills"),
        "Fill the memory of intermediate results and of weights' gradients with NaN before it is used; for tests.");
  m.attr("packed_check_calls") = fastbert::kCheckCalls;
  m.attr("packed_only_error") = fastbert::kPackedOnly;
  m.attr("most_rows_without_copy") = fastbert::kRowBlock;
  m.attr("least_rows_without_copy") = fastbert::kManyRows;
  m.def("has_products", &fastbert::has_products, "Whether products were written for the ISA in use, or are torch's.");
  m.def("has_bf16", &fastbert::has_bf16_dot, "Whether the ISA in use multiplies bfloat16; without, bf16 runs in fp32.");
  m.def("set_isa", &set_isa, pybind11::arg("name"), "Run the CPU kernels with another of isas(); for tests.");
}
