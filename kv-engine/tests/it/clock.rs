//! Times by the clock of the caller: that of a trace, which nothing but its arrivals advances.
use std::sync::Arc;
use std::time::Duration;

use kv_core::eviction::{Clock, ManualClock};

use super::*;

#[test]
fn times_are_those_of_the_clock() {
    let clock = Arc::new(ManualClock::new());
    let shared: Arc<dyn Clock> = Arc::<ManualClock>::clone(&clock);
    let mut engine = Engine::new(cache(4, 40), limits(1, 100)).with_clock(shared);
    let mut model = Echo::certain();
    let advance = |ms| clock.advance(Duration::from_millis(ms));
    advance(1000);
    engine.submit(Request::new(vec![1, 2, 3], 2)).expect("fits");
    advance(5);
    engine.submit(Request::new(vec![4, 5, 6], 1)).expect("fits");
    advance(20);
    let mut done = Vec::new();
    while engine.begin_step().expect("begins").is_some() {
        advance(100);
        for event in engine.forward(&mut model).expect("ends") {
            if let Event::Finished { generated, .. } = event {
                done.push((generated.admitted_ms, generated.first_token_ms));
            }
        }
        advance(1);
    }
    // The second one waits for two steps of 100 ms and what lies between.
    assert_eq!(done, [(25.0, 125.0), (20.0 + 202.0, 20.0 + 302.0)]);
    let stats = engine.stats();
    assert!((stats.seconds - 0.3).abs() < 1e-12, "{}", stats.seconds);
    assert_eq!((stats.steps, stats.generated_tokens), (3, 3));
}
