// Accesses of the simulated device that meet unmapped memory become error 700 instead of the end of the process.
#pragma once

#include <setjmp.h>

#include "api.h"

namespace kvferry::fake {

// Where the faults of this thread go; null: they are somebody else's business.
sigjmp_buf*& fault_target();
// Makes sure that our handler sees faults first; others (Rust's, Python's faulthandler) come after it.
void watch_faults();

// Ends the guarded body that this thread is in with an error.
[[noreturn]] inline void stop_with(CUresult error) { siglongjmp(*fault_target(), error); }

// Runs `body`; error 700 if it touched memory that is not there or not allowed. The body must own nothing.
template <class Body>
CUresult guarded(Body&& body) {
  watch_faults();
  sigjmp_buf* const outer = fault_target();
  sigjmp_buf here;
  const int stopped = sigsetjmp(here, 1);
  if (stopped != 0) {
    fault_target() = outer;
    return stopped;
  }
  fault_target() = &here;
  body();
  fault_target() = outer;
  return CUDA_SUCCESS;
}

}  // namespace kvferry::fake
