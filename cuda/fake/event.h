// Events: a place in a stream, kept as it was when the event was recorded.
#pragma once

#include "capture.h"

namespace kvferry::fake {

// One recording. Waits hold on to the recording, not to the event: recording again does not change them.
struct Record {
  Point place;
  std::atomic<u64> nanoseconds{0};
};

struct Event {
  Event(Context& owner, u32 how) : context(owner), flags(how) {}

  Context& context;
  const u32 flags;
  std::mutex lock;
  std::shared_ptr<Record> last;      // null: never recorded
  std::shared_ptr<Capture> capture;  // last recorded inside this capture
  std::vector<Node*> nodes;          // what was captured before it
};

Handles<Event>& events();
std::shared_ptr<Record> last_record(Event& event);
u64 now_nanoseconds();

}  // namespace kvferry::fake
