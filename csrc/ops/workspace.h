// Memory for what an operator makes and does not return, and for what is kept from call to call.
#pragma once

#include "array.h"

namespace fastbert {

// Bytes from a cache line's start, freed with the last that holds them.
class Block {
 public:
  // lasts: it is kept for much longer than what is made around it.
  Block(int64_t bytes, bool lasts);
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_;
  int64_t bytes_;
  bool is_lasting_;  // or it comes from the allocator
  size_t rounded_;
};

std::shared_ptr<Block> new_block(int64_t bytes);

// For packed weights and gradients, which stay from step to step, in memory of their own (lasting_memory.h): in the
// allocator's heap they would lie between the activations of a step, which it then can neither join nor give back. A
// step of DeBERTa-base on four texts of 512 tokens held 1.4 GB that was not in use.
std::shared_ptr<Block> lasting_block(int64_t bytes);

// Uninitialised memory that the calling thread keeps, as much as its largest call needs and 256 MB at most. A large
// piece of the system allocator's goes back to the system each time, and its pages' faults are 1.5 % of a whole forward
// pass of four texts of 512 tokens in float32. A call gives back all that it takes: until then the memory cannot grow.
Array workspace(const Shape& sizes, ScalarType dtype);

// The same for one matrix of all tokens. A large one goes back to the system with its last holder: a thread would keep
// that of its longest text. The allocator would, too: glibc held up to 24 MB of free memory after texts of 8,192 tokens
// (MiniLM, float32).
Array token_workspace(const Shape& sizes, ScalarType dtype);

// The same for weights packed for one product, of which as much is kept beside: activations, which grow with a batch,
// do not drive them out.
Array panels_workspace(int64_t bytes);

}  // namespace fastbert
