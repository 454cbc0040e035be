#include "engine/shared_pages.h"

#include <algorithm>

#include "base/assert.h"

namespace umem::engine {

using managed::MemSpan;

void SharedPages::open(std::uintptr_t base, std::size_t bytes) {
  *this = {};
  base_ = base;
  pages_.resize(bytes >> kPageShift);
}

template <class Act>
void SharedPages::each(std::vector<Page>& pages, std::uintptr_t base, MemSpan span, Act act) {
  const std::size_t first = (span.base - base) >> kPageShift;
  for (std::size_t i = 0; i < span.bytes >> kPageShift; ++i) act(pages[first + i]);
}

void SharedPages::count(const Page& page, bool entering) {
  const auto count = [&](std::size_t& total, bool counts) {
    UMEM_ASSERT(entering || !counts || total >= kPageBytes, "what leaves was counted when it came");
    if (counts) total = entering ? total + kPageBytes : total - kPageBytes;
  };
  count(idle_.dead, page.idle && page.dead);
  count(idle_.dropped, page.idle && page.dropped);
  count(idle_.host, page.idle && page.host);
}

SharedPages::Amounts SharedPages::count(MemSpan span) const {
  Amounts found;
  const std::size_t first = (span.base - base_) >> kPageShift;
  for (std::size_t i = 0; i < span.bytes >> kPageShift; ++i) {
    const Page& page = pages_[first + i];
    found.dead += page.dead ? kPageBytes : 0;
    found.dropped += page.dropped ? kPageBytes : 0;
    found.host += page.host ? kPageBytes : 0;
  }
  return found;
}

void SharedPages::take(MemSpan span) {
  each(pages_, base_, span, [&](Page& page) {
    UMEM_ASSERT(page.idle, "a page is of one block at a time");
    count(page, false);
    page = {false, false, false, false};
  });
}

void SharedPages::give_back(MemSpan span, bool resident, std::size_t host_bytes) {
  std::size_t host_pages = host_bytes >> kPageShift;
  each(pages_, base_, span, [&](Page& page) {
    UMEM_ASSERT(!page.idle, "a page is given back by the block that took it");
    page = {true, resident, false, host_pages > 0};
    host_pages -= host_pages > 0 ? 1 : 0;
    count(page, true);
  });
}

template <class Want>
void SharedPages::append_runs(std::size_t bytes, std::vector<MemSpan>& out, Want want) const {
  std::size_t found = 0;
  bool joins = false;
  for (std::size_t i = 0; i < pages_.size() && found < bytes; ++i) {
    const bool wanted = want(pages_[i]);
    if (wanted && joins) out.back().bytes += kPageBytes;
    if (wanted && !joins) out.push_back({base_ + (i << kPageShift), kPageBytes});
    found += wanted ? kPageBytes : 0;
    joins = wanted;
  }
}

void SharedPages::find_dead(std::size_t bytes, std::vector<MemSpan>& out) const {
  if (idle_.dead > 0) append_runs(bytes, out, [](const Page& page) { return page.dead; });
}

void SharedPages::drop(const std::vector<MemSpan>& dead) {
  for (const MemSpan& span : dead)
    each(pages_, base_, span, [&](Page& page) {
      UMEM_ASSERT(page.idle && page.dead, "only dead pages are dropped");
      count(page, false);
      page.dead = false;
      page.dropped = true;
      count(page, true);
    });
}

void SharedPages::hold_host(const std::vector<MemSpan>& idle) {
  for (const MemSpan& span : idle)
    each(pages_, base_, span, [&](Page& page) {
      count(page, false);
      page.dropped = false;
      page.host = true;
      count(page, true);
    });
}

void SharedPages::forget_dropped() {
  for (Page& page : pages_) page.dropped = false;
  idle_.dropped = 0;
}

void SharedPages::lose_track(std::vector<MemSpan>& out) {
  append_runs(pages_.size() << kPageShift, out, [](const Page& page) { return page.idle; });
  for (Page& page : pages_) page.dead = page.dropped = false;
  idle_.dead = idle_.dropped = 0;
}

}  // namespace umem::engine
