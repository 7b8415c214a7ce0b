// One launch of csrc/cuda in the emulation: `cuda_runner KERNEL up|down < operands > results`. Operands come in the
// order in which the functions below take them: 'i' and int64, 'd' and double, or a buffer: 'n' (null), 'r' (read
// only) or 'w' (sent back), int64 bytes, int64 offset from an aligned address, and the bytes. A buffer ends where its
// memory ends, so that AddressSanitizer sees who reads on.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/cuda/embedding.h"
#include "../../csrc/cuda/feed_forward.h"
#include "../../csrc/cuda/layer_norm.h"

alignas(16) float fastbert::shared[cuda_emulation::kSharedBytes / sizeof(float)];

namespace {

struct Buffer {
  char kind;
  size_t bytes, offset;
  char* memory;
  std::vector<char> before;
};
std::vector<Buffer> buffers;

void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  exit(2);
}

template <typename T>
T read() {
  T value;
  expect(fread(&value, sizeof(value), 1, stdin) == 1, "operands end early");
  return value;
}

int64_t integer() {
  expect(read<char>() == 'i', "an integer was expected");
  return read<int64_t>();
}

double real() {
  expect(read<char>() == 'd', "a real number was expected");
  return read<double>();
}

template <typename T = void>
T* buffer() {
  const char kind = read<char>();
  if (kind == 'n') return nullptr;
  expect(kind == 'r' || kind == 'w', "a buffer was expected");
  const auto bytes = static_cast<size_t>(read<int64_t>()), offset = static_cast<size_t>(read<int64_t>());
  void* allocated = nullptr;
  expect(posix_memalign(&allocated, 16, bytes + offset) == 0, "no memory");
  char* const memory = static_cast<char*>(allocated);
  if (bytes > 0) expect(fread(memory + offset, bytes, 1, stdin) == 1, "a buffer ends early");
  buffers.push_back({kind, bytes, offset, memory, {memory + offset, memory + offset + bytes}});
  return reinterpret_cast<T*>(memory + offset);
}

fastbert::DType dtype() { return static_cast<fastbert::DType>(integer()); }

fastbert::Activation activation() { return static_cast<fastbert::Activation>(integer()); }

fastbert::DropoutMask dropout() {
  const double p = real();
  return fastbert::dropout_mask(p, buffer<const int64_t>());
}

// Braces evaluate their operands from left to right.
void launch(const std::string& kernel) {
  cudaStream_t stream{};
  if (kernel == "add_layer_norm_fwd") {
    const fastbert::AddLayerNormFwdArgs args{dtype(),
                                             integer() != 0,
                                             buffer(),
                                             buffer(),
                                             buffer(),
                                             buffer(),
                                             buffer(),
                                             dropout(),
                                             static_cast<float>(real()),
                                             integer(),
                                             static_cast<int>(integer()),
                                             buffer(),
                                             buffer(),
                                             buffer<float>(),
                                             buffer<float>()};
    launch_add_layer_norm_fwd(args, stream);
  } else if (kernel == "add_layer_norm_bwd") {
    fastbert::AddLayerNormBwdArgs args{dtype(),         buffer(), buffer(),  buffer(),  buffer<const float>(),
                                       buffer<float>(), buffer(), dropout(), integer(), static_cast<int>(integer()),
                                       buffer(),        buffer(), buffer(),  buffer(),  buffer(),
                                       nullptr};
    const int64_t shares = fastbert::add_layer_norm_bwd_shares(args.rows, args.hidden_size);
    std::vector<float> memory(static_cast<size_t>(shares * 3 * args.hidden_size), NAN);
    args.shares = memory.data();
    launch_add_layer_norm_bwd(args, stream);
  } else if (kernel == "embed_fwd") {
    const fastbert::EmbedFwdArgs args{dtype(),
                                      buffer(),
                                      buffer(),
                                      buffer(),
                                      buffer<const int64_t>(),
                                      buffer<const int64_t>(),
                                      buffer<const int64_t>(),
                                      integer(),
                                      integer(),
                                      integer(),
                                      buffer(),
                                      buffer(),
                                      static_cast<float>(real()),
                                      integer(),
                                      static_cast<int>(integer()),
                                      buffer()};
    launch_embed_fwd(args, stream);
  } else if (kernel == "activation_fwd") {
    fastbert::ActivationFwdArgs args{dtype(), activation(), integer() != 0, buffer(), integer(), integer(), buffer()};
    if (args.inner == nullptr) args.inner = const_cast<void*>(args.pre);
    launch_activation_fwd(args, stream);
  } else if (kernel == "activation_bwd") {
    void* dinner;
    fastbert::ActivationBwdArgs args{dtype(),   activation(), integer() != 0, dinner = buffer(), buffer(), integer(),
                                     integer(), buffer(),     buffer(),       buffer(),          nullptr};
    if (args.dpre == nullptr) args.dpre = dinner;
    if (args.inner == nullptr) args.inner = dinner;
    const int64_t shares = fastbert::activation_bwd_shares(args.rows);
    std::vector<float> memory(static_cast<size_t>(shares * (args.gated ? 2 : 1) * args.columns), NAN);
    args.shares = memory.data();
    launch_activation_bwd(args, stream);
  } else {
    expect(false, "no such kernel");
  }
}

}  // namespace

int main(int, char** argv) {
  cuda_emulation::descending = std::strcmp(argv[2], "down") == 0;
  launch(argv[1]);
  for (const Buffer& b : buffers) {
    const char* const data = b.memory + b.offset;
    if (b.kind == 'r') {
      expect(b.bytes == 0 || memcmp(data, b.before.data(), b.bytes) == 0, "an operand that is only read was written");
    } else {
      fwrite(data, 1, b.bytes, stdout);
    }
  }
}
