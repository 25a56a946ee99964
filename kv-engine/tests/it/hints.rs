//! What the eviction policy hears of the return of requests.
use std::sync::{Arc, Mutex};

use super::*;
use kv_core::eviction::{BlockInfo, EvictionPolicy, Lru, Priority, Return};
use kv_core::{BlockId, GroupId};

type Heard = Arc<Mutex<Vec<Option<Return>>>>;

/// The least recent first, with a record of the hints.
#[derive(Debug)]
struct Listening(Lru, Heard);

impl EvictionPolicy for Listening {
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.0.stored(block, info);
    }
    fn reused(&mut self, block: BlockId) {
        self.0.reused(block);
    }
    fn hinted(&mut self, _: BlockId, hint: Option<Return>) {
        self.1.lock().unwrap().push(hint);
    }
    fn idle(&mut self, block: BlockId) {
        self.0.idle(block);
    }
    fn dropped(&mut self, block: BlockId) {
        self.0.dropped(block);
    }
    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        self.0.set_priority(block, priority);
    }
    fn evict(&mut self) -> Option<BlockId> {
        self.0.evict()
    }
}

fn engine(num_blocks: u32, limits: Limits) -> (Engine<CpuBackend>, Heard) {
    let (mut cache, heard) = (cache(4, num_blocks), Heard::default());
    let policy = Listening(Lru::new(num_blocks), Arc::clone(&heard));
    assert!(cache.set_policy(GroupId(0), Box::new(policy)));
    (Engine::new(cache, limits), heard)
}

fn finish(engine: &mut Engine<CpuBackend>) -> Vec<Vec<u32>> {
    let mut model = Echo::certain();
    let mut texts = std::collections::BTreeMap::new();
    while engine.has_work() {
        for event in engine.step(&mut model).expect("runs") {
            if let Event::Finished { index, generated } = event {
                texts.insert(index, generated.tokens);
            }
        }
    }
    texts.into_values().collect()
}

#[test]
fn every_text_of_a_request_ends_with_its_hint() {
    let prompt: Vec<_> = (0..17).collect();
    for hint in [None, Some(Return::Ended), Some(Return::ToolCall)] {
        let (mut engine, heard) = engine(40, limits(8, 100));
        let request = Request { hint, ..Request::new(prompt.clone(), 6) };
        let others = vec![Sampler::greedy(); 2];
        assert_eq!(engine.submit_choices(request, others).expect("fits"), 0..3);
        assert_eq!(finish(&mut engine), vec![expected(&prompt, 6); 3]);
        let heard = heard.lock().unwrap();
        assert!(heard.len() >= 5 && heard.iter().all(|one| *one == hint), "{hint:?}: {heard:?}");
    }
}

#[test]
fn a_preempted_request_says_nothing_until_it_ends() {
    let prompts = [(0..9).collect::<Vec<u32>>(), (20..29).collect()];
    let (mut engine, heard) = engine(8, limits(2, 100));
    for prompt in &prompts {
        let hint = Some(Return::Idle);
        engine.submit(Request { hint, ..Request::new(prompt.clone(), 16) }).expect("fits");
    }
    let texts = finish(&mut engine);
    assert_eq!(texts, [expected(&prompts[0], 16), expected(&prompts[1], 16)]);
    assert!(engine.stats().preemptions > 0);
    let heard = heard.lock().unwrap();
    assert!(heard.contains(&None) && heard.contains(&Some(Return::Idle)), "{heard:?}");
    assert_eq!(heard.last(), Some(&Some(Return::Idle)));
}
