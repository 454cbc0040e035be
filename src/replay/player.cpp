#include "replay/player.h"

namespace umem::replay {
namespace {

Status not_live(const std::string& what, BlockId id) {
  return {Code::kInvalidArgument, what + " id " + std::to_string(id) +
                                      ", which is not live: never allocated, or freed already"};
}

}  // namespace

Status Player::play(const Event& event) {
  switch (event.kind) {
    case Event::Kind::kAlloc:
      return allocate(event);
    case Event::Kind::kOp:
      return op(event);
    case Event::Kind::kFree:
      return free(event);
    case Event::Kind::kStep:
      return step();
  }
  return {};
}

Status Player::finish() {
  UMEM_RETURN_IF_ERROR(perform());
  if (machine_.steps() == 0 && ops_ > 0) machine_.end_step();
  return {};
}

bool Player::take(BlockId id, void*& ptr) {
  Block* block = blocks_.find(id);
  if (!block) return false;
  ptr = block->ptr;
  blocks_.erase(block);
  return true;
}

void Player::release_all() {
  blocks_.each([&](const Block& block) {
    if (block.ptr) machine_.release(block.ptr);
  });
  blocks_.clear();
  // Those that have left the table, and whose release was still to come.
  for (const Action& action : buffered_)
    if (action.ptr && (action.freed || !action.allocates)) machine_.release(action.ptr);
  buffered_.clear();
}

Status Player::allocate(const Event& event) {
  if (blocks_.find(event.id))
    return {Code::kInvalidArgument,
            "id " + std::to_string(event.id) + " is allocated twice without a free between"};
  if (buffered_.size() >= kMaxBuffered) UMEM_RETURN_IF_ERROR(perform());
  Block& block = blocks_.insert(event.id);
  block.bytes = event.bytes;
  if (event.bytes == 0) return {};
  buffered_.push_back({event.id, nullptr, event.bytes, event.tag, event.family, 0, true, false});
  block.pending = static_cast<std::uint32_t>(buffered_.size());
  return {};
}

Status Player::free(const Event& event) {
  if (buffered_.size() >= kMaxBuffered) UMEM_RETURN_IF_ERROR(perform());
  Block* block = blocks_.find(event.id);
  if (!block) return not_live("free of", event.id);
  if (block->pending) buffered_[block->pending - 1].freed = true;
  if (block->bytes > 0) {
    if (buffered_.empty()) {
      machine_.release(block->ptr);
    } else {
      buffered_.push_back({event.id, block->ptr, 0, {}, {}, block->pending, false, false});
    }
  }
  blocks_.erase(block);
  return {};
}

// Once an op: what is read and written is written.
Status Player::use(const Event& event, std::size_t which) {
  const bool write = which >= event.reads.size();
  const BlockId id = write ? event.writes[which - event.reads.size()] : event.reads[which];
  Block* block = blocks_.find(id);
  if (!block) return not_live("the op uses", id);
  if (block->op != ops_) {
    block->op = ops_;
    block->slot = static_cast<std::uint32_t>(uses_.size());
    uses_.push_back({block, write, false});
  }
  Use& use = uses_[block->slot];
  use.write |= write;
  bool whole = true;
  for (std::size_t i = 0; i + 2 < event.parts.size(); i += 3) {
    if (event.parts[i] != which) continue;
    const std::uint64_t begin = event.parts[i + 1], end = event.parts[i + 2];
    if (begin >= end || end > block->bytes)
      return {Code::kInvalidArgument, "\"parts\" has bytes " + std::to_string(begin) + " to " +
                                          std::to_string(end) + " of id " + std::to_string(id) +
                                          ", which has " + std::to_string(block->bytes)};
    parts_.push_back({block->slot, begin, end});
    whole = false;
  }
  use.whole |= whole;
  return {};
}

Status Player::op(const Event& event) {
  if (event.us < 0)
    return {Code::kInvalidArgument,
            "the op has no \"us\", so that it takes no known time; a recording has it, or give the "
            "ops a duration before the replay"};
  ++ops_;
  uses_.clear();
  parts_.clear();
  const std::size_t count = event.reads.size() + event.writes.size();
  if (event.parts.size() % 3 != 0)
    return {Code::kInvalidArgument, "\"parts\" is not in rows of three"};
  for (std::size_t i = 0; i < event.parts.size(); i += 3)
    if (event.parts[i] >= count)
      return {Code::kInvalidArgument, "\"parts\" names access " + std::to_string(event.parts[i]) +
                                          ", and the op has " + std::to_string(count)};
  for (std::size_t i = 0; i < count; ++i) UMEM_RETURN_IF_ERROR(use(event, i));
  std::erase_if(parts_, [&](const Part& part) { return uses_[part.use].whole; });
  machine_.inputs().clear();
  for (const Use& use : uses_)
    if (use.whole && use.block->ptr) machine_.inputs().push_back({use.block->ptr});
  for (const Part& part : parts_)
    if (void* ptr = uses_[part.use].block->ptr)
      machine_.inputs().push_back({ptr, part.begin, part.end - part.begin});
  machine_.begin(event.family);
  if (Status status = perform(); !status.ok()) {
    machine_.abandon();
    return status;
  }
  machine_.accesses().clear();
  for (const Use& use : uses_)
    if (use.whole && use.block->ptr)
      machine_.accesses().push_back(
          {reinterpret_cast<std::uintptr_t>(use.block->ptr), use.block->bytes, use.write});
  for (const Part& part : parts_) {
    const Use& use = uses_[part.use];
    if (use.block->ptr)
      machine_.accesses().push_back({reinterpret_cast<std::uintptr_t>(use.block->ptr) + part.begin,
                                     part.end - part.begin, use.write});
  }
  return machine_.end(event.us);
}

// What is buffered, in its order. The table keeps its places: blocks freed here left it already.
Status Player::perform() {
  for (Action& action : buffered_) {
    if (!action.allocates) {
      void*& ptr = action.frees ? buffered_[action.frees - 1].ptr : action.ptr;
      machine_.release(ptr);
      ptr = nullptr;
      continue;
    }
    Result<void*> got = machine_.allocate(action.bytes, action.tag, action.family);
    if (!got.ok()) return got.take_status();
    action.ptr = got.value();
    if (action.freed) continue;
    Block* block = blocks_.find(action.id);
    block->ptr = action.ptr;
    block->pending = 0;
  }
  buffered_.clear();
  return {};
}

Status Player::step() {
  UMEM_RETURN_IF_ERROR(perform());
  machine_.end_step();
  return {};
}

}  // namespace umem::replay
