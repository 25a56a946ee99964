//! What a policy hears of the return of the sequences that release its blocks.
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::eviction::{BlockInfo, EvictionPolicy, Lru, Priority, Return};

/// A call of the policy that makes a candidate, or the report before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Hinted(u32, Option<Return>),
    Idle(u32),
}
use Heard::{Hinted, Idle};

/// The least recent first, with a record of what it hears.
#[derive(Debug)]
struct Listening {
    inner: Lru,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl EvictionPolicy for Listening {
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.inner.stored(block, info);
    }
    fn reused(&mut self, block: BlockId) {
        self.inner.reused(block);
    }
    fn held(&mut self, block: BlockId) {
        self.inner.held(block);
    }
    fn hinted(&mut self, block: BlockId, hint: Option<Return>) {
        self.heard.lock().unwrap().push(Hinted(block.0, hint));
    }
    fn idle(&mut self, block: BlockId) {
        self.heard.lock().unwrap().push(Idle(block.0));
        self.inner.idle(block);
    }
    fn dropped(&mut self, block: BlockId) {
        self.inner.dropped(block);
    }
    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        self.inner.set_priority(block, priority);
    }
    fn evict(&mut self) -> Option<BlockId> {
        self.inner.evict()
    }
}

struct Listened {
    cache: KvCache<NullBackend>,
    heard: Arc<Mutex<Vec<Heard>>>,
}

const PROMPT: [u32; 5] = [1, 2, 3, 4, 5];
const LONGER: [u32; 7] = [1, 2, 3, 4, 6, 7, 8];
const SOON: Return = Return::Within(Duration::from_secs(3));

impl Listened {
    fn new() -> Self {
        let mut cache = cache(2, 8);
        let heard = Arc::new(Mutex::new(Vec::new()));
        let policy = Listening { inner: Lru::new(8), heard: Arc::clone(&heard) };
        assert!(cache.set_policy(GroupId(0), Box::new(policy)));
        Self { cache, heard }
    }

    /// Begins a sequence and computes its prompt.
    fn run(&mut self, sequence: SequenceId, prompt: &[u32], options: StartOptions<'_>) {
        self.cache.start(sequence, prompt, options).unwrap();
        let mut step = self.cache.begin_step(&[StepInput::prompt(sequence, prompt)]).unwrap();
        write_all(&mut step).unwrap();
        step.commit().unwrap();
    }

    /// Ends a sequence, and returns what the policy has heard since the last call.
    fn end(&mut self, sequence: SequenceId) -> Vec<Heard> {
        self.cache.release(sequence).unwrap();
        self.take()
    }

    fn take(&self) -> Vec<Heard> {
        std::mem::take(&mut self.heard.lock().unwrap())
    }
}

/// Lists what a policy hears of blocks that are released with the same word.
fn told(blocks: &[u32], hint: Option<Return>) -> Vec<Heard> {
    blocks.iter().flat_map(|block| [Hinted(*block, hint), Idle(*block)]).collect()
}

#[test]
fn a_policy_hears_the_hint_before_each_block_is_idle() {
    let mut of = Listened::new();
    of.run(SEQ[0], &PROMPT, StartOptions::default().with_hint(Return::Idle));
    assert_eq!(of.take(), []);
    assert_eq!(of.end(SEQ[0]), told(&[2, 1, 0], Some(Return::Idle)), "tail first");
    // The last word before the end counts.
    of.run(SEQ[0], &PROMPT, StartOptions::default().with_hint(Return::Idle));
    of.cache.hint(SEQ[0], Return::Ended).unwrap();
    of.cache.hint(SEQ[0], SOON).unwrap();
    assert_eq!(of.end(SEQ[0]).last(), Some(&Idle(0)));
    of.run(SEQ[0], &PROMPT, StartOptions::default().with_hint(Return::Idle));
    of.cache.hint(SEQ[0], None).unwrap();
    let heard = of.end(SEQ[0]);
    assert!(heard.ends_with(&told(&[1, 0], None)), "taken back: {heard:?}");
    // The row of the sequence forgets what its owner said.
    of.run(SEQ[1], &PROMPT, StartOptions::default().with_hint(Return::ToolCall));
    assert!(of.end(SEQ[1]).ends_with(&told(&[1, 0], Some(Return::ToolCall))));
    of.run(SEQ[1], &PROMPT, StartOptions::default());
    assert!(of.end(SEQ[1]).ends_with(&told(&[1, 0], None)), "nothing was said");
}

#[test]
fn a_sequence_that_computes_a_content_again_decides_too() {
    let mut of = Listened::new();
    for (sequence, hint) in [(SEQ[0], Return::Idle), (SEQ[1], SOON)] {
        of.cache.start(sequence, &PROMPT, StartOptions::default().with_hint(hint)).unwrap();
    }
    for sequence in [SEQ[0], SEQ[1]] {
        let mut step = of.cache.begin_step(&[StepInput::tokens(sequence, &PROMPT)]).unwrap();
        write_all(&mut step).unwrap();
        step.commit().unwrap();
    }
    let first = of.end(SEQ[0]);
    assert_eq!(first, told(&[2], Some(Return::Idle)), "the other has the full blocks too");
    let [renewed, Idle(2), rest @ ..] = &of.end(SEQ[1])[..] else { panic!("the part is known") };
    assert_eq!(*renewed, Hinted(2, Some(SOON)));
    assert_eq!(rest, told(&[1, 0], Some(SOON)));
}

#[test]
fn the_last_holder_of_a_block_decides() {
    let mut of = Listened::new();
    of.run(SEQ[0], &PROMPT, StartOptions::default().with_hint(Return::Ended));
    of.run(SEQ[1], &LONGER, StartOptions::default().with_hint(SOON));
    let own = of.end(SEQ[0]);
    assert_eq!(own, told(&[2], Some(Return::Ended)), "only the rest is its own");
    let [hinted, ..] = of.end(SEQ[1])[..] else { panic!("three blocks and more are released") };
    assert!(matches!(hinted, Hinted(_, Some(SOON))), "{hinted:?}");
    // Another order: the shared part is released without a hint.
    of.run(SEQ[0], &PROMPT, StartOptions::default());
    of.run(SEQ[1], &LONGER, StartOptions::default().with_hint(SOON));
    of.end(SEQ[1]);
    assert!(of.end(SEQ[0]).ends_with(&told(&[1, 0], None)));
}

#[test]
fn a_fork_inherits_the_hint_and_may_have_its_own() {
    let mut of = Listened::new();
    of.run(SEQ[0], &PROMPT, StartOptions::default().with_hint(Return::Idle));
    of.cache.fork(SEQ[0], SEQ[1]).unwrap();
    of.cache.fork(SEQ[0], SEQ[2]).unwrap();
    of.cache.hint(SEQ[1], Return::Ended).unwrap();
    assert_eq!((of.end(SEQ[0]), of.end(SEQ[1])), (vec![], vec![]), "the other holds all");
    assert_eq!(of.end(SEQ[2]), told(&[2, 1, 0], Some(Return::Idle)));
}

#[test]
fn blocks_that_leave_before_the_end_have_no_hint() {
    let mut of = Listened::new();
    let options = StartOptions::default().with_hint(Return::Ended);
    of.run(SEQ[0], &PROMPT, options);
    of.cache.truncate(SEQ[0], 2).unwrap();
    assert_eq!(of.take(), told(&[1], None), "cut off");
    of.cache.preempt(SEQ[0]).unwrap();
    assert_eq!(of.take(), told(&[0], None), "it goes on");
    of.run(SEQ[0], &PROMPT, options.with_resumed(true));
    of.take();
    of.cache.reset().unwrap();
    assert!(of.take().ends_with(&told(&[1, 0], Some(Return::Ended))));
}

#[test]
fn a_hold_leaves_the_last_word_alone_and_a_pin_clears_it() {
    let mut of = Listened::new();
    of.run(SEQ[0], &PROMPT, StartOptions::default().with_hint(SOON));
    of.end(SEQ[0]);
    let group = GroupId(0);
    let key = of.cache.state().pool(group).and_then(|pool| pool.content(BlockId(0))).unwrap().key;
    let hold = of.cache.hold_block(group, BlockId(0), key).unwrap().unwrap();
    of.cache.release_hold(hold).unwrap();
    assert_eq!(of.take(), [Idle(0)]);
    let pin = of.cache.pin_prefix(&PROMPT[..4], StartOptions::default());
    assert!(of.cache.unpin(pin.id).unwrap());
    assert_eq!(of.take(), told(&[1, 0], None));
    check_invariants(of.cache.state());
}

#[test]
fn hints_are_taken_at_any_time_of_a_known_sequence() {
    let mut of = Listened::new();
    let unknown = of.cache.hint(SEQ[0], Return::Ended);
    let Err(CacheError::Plan(PlanError::UnknownSequence { sequence })) = unknown else {
        panic!("{unknown:?}")
    };
    assert_eq!(sequence, SEQ[0]);
    of.run(SEQ[0], &PROMPT, StartOptions::default());
    of.cache.begin_step(&[StepInput::tokens(SEQ[0], &[6])]).unwrap().hold();
    of.cache.hint(SEQ[0], Return::ToolCall).unwrap();
    drop(of.cache.held());
    assert_eq!(of.cache.state().seq_len(SEQ[0]), Some(5));
    assert!(of.end(SEQ[0]).ends_with(&told(&[1, 0], Some(Return::ToolCall))));
}
