// Exchanges with one rule broken. A scheduler that lets them pass proves nothing about the right one.
#pragma once

#include "kvferry/exchange.cuh"

namespace kvferry::selftest {

// The epoch advances while CTAs of the call may not have started: they take it for the next one.
struct FirstAdvances : ExchangeRules {
  static constexpr bool kLastAdvances = false;
};
// Pushes after reading the target's header only: ranks decide differently about a call that one of them refuses.
struct ReadsTarget : ExchangeRules {
  static constexpr bool kReadsAll = false;
};
// Compares arrivals with this call's number although they add up over calls.
struct Forgets : ExchangeRules {
  static constexpr bool kCumulative = false;
};
// Tells of arrival before all threads have stored.
struct SignalsEarly : ExchangeRules {
  static constexpr bool kSignalsAfter = false;
};
// Takes any header for this call's.
struct AnyHeader : ExchangeRules {
  static constexpr bool kWaitsForPlace = false;
};

// X(name, body, params, most threads per CTA)
#define KVF_BROKEN_EXCHANGES(X)                                                                       \
  X(exchange_first_advances, (exchange<selftest::FirstAdvances>), ExchangeSmall, 1024)                \
  X(exchange_reads_target, (exchange<selftest::ReadsTarget>), ExchangeSmall, 1024)                    \
  X(exchange_forgets, (exchange<selftest::Forgets>), ExchangeSmall, 1024)                             \
  X(exchange_signals_early, (exchange<selftest::SignalsEarly>), ExchangeSmall, 1024)                  \
  X(exchange_any_header, (exchange<selftest::AnyHeader>), ExchangeSmall, 1024)

}  // namespace kvferry::selftest
