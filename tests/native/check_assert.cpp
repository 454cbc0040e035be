// A violated invariant stops the process, with its location and message, if asserts are built in;
// otherwise its expression is not evaluated. The argument names the build.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "base/assert.h"
#include "expect.h"
#include "residency/ledger.h"

namespace {

using namespace umem;  // NOLINT: a test program

// The stderr and exit status of a child process that runs `act`.
template <class Act>
std::string run_in_child(Act act, int& status) {
  int ends[2];
  EXPECT(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    act();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[256];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  close(ends[0]);
  EXPECT(waitpid(child, &status, 0) == child);
  return text;
}

void break_an_invariant() {
  residency::Ledger ledger;
  ledger.add(1, kPageBytes, false, residency::Tag::kTemp, residency::Family::kNone);
  ledger.set_state(1, residency::State::kDead);  // it never had a frame
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 2 && kAsserts == (std::strcmp(argv[1], "on") == 0));
  int status = 0;
  const std::string text = run_in_child(break_an_invariant, status);
  if (kAsserts) {
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    EXPECT(text.find("residency/ledger.cpp:") != std::string::npos);
    EXPECT(text.find("no such change of state") != std::string::npos);
    EXPECT(text.find("may_become(unit.state, state)") != std::string::npos);
  } else {
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(text.empty());
  }
  int evaluated = 0;
  UMEM_ASSERT(++evaluated == 1, "an assert is evaluated once");
  EXPECT(evaluated == (kAsserts ? 1 : 0));
  return g_wrong ? 1 : 0;
}
