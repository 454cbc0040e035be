#include "runtime/scope_names.h"

#include <utility>

#include "base/kept_names.h"

namespace umem::runtime {

static constinit thread_local std::uint32_t t_scope = 0;

std::uint32_t ScopeNames::number_of(const std::string& name) {
  const std::lock_guard guard(mutex_);
  const auto [at, fresh] =
      numbers_.emplace(kept_name(numbers_, name), static_cast<std::uint32_t>(names_.size()));
  if (fresh) names_.push_back(at->first);
  return at->second;
}

std::string ScopeNames::name(std::uint32_t number) const {
  const std::lock_guard guard(mutex_);
  return names_[number];
}

std::uint32_t ScopeNames::current() {
  return t_scope;
}

std::string ScopeNames::enter(const std::string& name) {
  return this->name(std::exchange(t_scope, number_of(name)));
}

}  // namespace umem::runtime
