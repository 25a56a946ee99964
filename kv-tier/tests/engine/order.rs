//! The order of waits: blocks for their copies, reads for room.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::StartOptions;
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{BlockStore, MemoryStore, TierOptions};

use crate::store::{HangStore, Operation, soon};
use crate::support::{Engine, builder, identity, names, patient, spec, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

/// A step takes the blocks whose copies are on their way, and host memory has the rows from before.
#[test]
fn a_copy_on_its_way_refuses_no_step() {
    // Room for one of the prompts, and for a single block more than it.
    for blocks in [130, 131] {
        let options = TierOptions::new().with_host(4 << 20);
        let mut engine = Engine::new(spec(blocks), identity(), options);
        let prompts: Vec<_> = (1..6).map(|number| text(number, 520)).collect();
        for prompt in &prompts {
            let (sequence, _) = engine.start_alone(prompt, plain());
            engine.cache.cache_mut().release(sequence).unwrap();
            // Two chunks are on their way now.
            engine.cache.poll().unwrap();
            engine.assert_nothing_held();
        }
        engine.forget();
        for prompt in &prompts {
            assert_eq!(engine.run(prompt, plain()).1, 512, "{blocks} blocks");
            engine.forget();
        }
        assert_eq!(engine.cache.stats().offload_missed, 0);
    }
}

/// A block that is written in place, or wiped, while it is copied: it waits too.
#[test]
fn a_block_that_is_copied_is_written_after_that() {
    for is_wiped in [false, true] {
        // Not a block to spare, so that the last block is written in place.
        let spec = builder().paged(4, 129).changes(256).wipe_on_release(is_wiped).build().unwrap();
        let mut engine = Engine::new(spec, identity(), TierOptions::new().with_host(4 << 20));
        let prompt = text(1, 512);
        let (sequence, _) = engine.start_alone(&prompt, plain());
        engine.cache.poll().unwrap();
        engine.cache.cache_mut().truncate(sequence, 509).unwrap();
        let other = [&prompt[..509], &[7, 8, 9, 10, 11, 12, 13]].concat();
        engine.compute(sequence, &other, 509);
        engine.check(sequence, &other);
        engine.cache.cache_mut().release(sequence).unwrap();
        assert!(engine.cache.cache_mut().forget_prefix(&other, plain(), 0).unwrap() > 0);
        engine.forget();
        // The last token is always computed.
        let longer = [&prompt[..], &[5]].concat();
        assert_eq!(engine.run(&longer, plain()).1, 512);
    }
}

/// A write of a chunk that left host memory hangs. Room that comes from elsewhere is used at once.
#[test]
fn a_read_waits_for_room_and_not_for_the_writes_of_others() {
    let (reads, writes) = (Arc::new(HangStore::new()), Arc::new(HangStore::new()));
    let prompts = [text(1, 520), text(2, 260), text(3, 260)];
    let rule = |policy| patient(&*reads).with_write(WriteRule::new(policy));
    let mut filler = {
        let options = TierOptions::new();
        let lane = rule(WritePolicy::OnPublish);
        let options = options.with_store_options(Box::new(Arc::clone(&reads)), lane);
        Engine::new(spec(512), identity(), options)
    };
    for prompt in &prompts[1..] {
        filler.run(prompt, plain());
        filler.flush();
        filler.forget();
    }
    // Room for three chunks.
    let options = TierOptions::new()
        .with_host(210 << 10)
        .with_store_options(Box::new(Arc::clone(&reads)), rule(WritePolicy::Never))
        .with_store_options(Box::new(Arc::clone(&writes)), rule(WritePolicy::OnLeave));
    let mut engine = Engine::new(spec(512), identity(), options);
    engine.run(&prompts[0], plain());
    while engine.cache.stats().host_chunks < 2 {
        engine.cache.poll().unwrap();
    }
    // Takes the last room.
    reads.hang(Operation::Get, 1);
    let lost = engine.cache.prefetch(&prompts[1], &plain());
    poll_until_hanging(&mut engine, &reads, Operation::Get);
    // The last chunk of the first prompt has to leave.
    writes.hang(Operation::Put, u64::MAX);
    let waiting = engine.cache.prefetch(&prompts[2], &plain());
    poll_until_hanging(&mut engine, &writes, Operation::Put);
    assert!(!engine.cache.is_ready(waiting), "there is no room");
    reads.remove(&names(&prompts[1], &identity()), soon()).unwrap();
    reads.release();
    let end = Instant::now() + Duration::from_secs(10);
    while !engine.cache.is_ready(waiting) {
        engine.cache.poll().unwrap();
        assert!(Instant::now() < end, "it waits for the write");
    }
    assert_eq!(engine.start(waiting, &prompts[2], plain()).1, 256);
    assert!(engine.cache.cancel(lost));
    assert_eq!(engine.cache.stats().stores[1].writes, 0, "it hangs still");
    writes.release();
    engine.forget();
}

fn poll_until_hanging(engine: &mut Engine, store: &HangStore, operation: Operation) {
    let end = soon();
    while store.calls(operation) == 0 {
        engine.cache.poll().unwrap();
        assert!(Instant::now() < end, "no call came");
    }
    store.wait_hanging(1);
}

/// Polls until a store has some number of chunks.
fn poll_until_written(engine: &mut Engine, writes: u64) {
    let end = soon();
    while engine.cache.stats().stores[0].writes < writes {
        engine.cache.poll().unwrap();
        assert!(Instant::now() < end, "{:?}", engine.cache.stats());
    }
}

#[test]
fn what_is_pinned_later_is_written_at_once() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let never = WritePolicy::OnReuse(9.try_into().unwrap());
    let lane = patient(&*store).with_write(WriteRule::new(never));
    // Room for two chunks.
    let options = TierOptions::new().with_host(200 << 10);
    let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
    let mut engine = Engine::new(spec(2048), identity(), options);
    // Without the beginning that texts share.
    let [there, gone, other] = [1, 2, 3].map(|number| text(number, 608).split_off(8));
    engine.run(&gone, plain());
    engine.flush();
    engine.run(&there, plain());
    engine.flush();
    assert_eq!(engine.cache.stats().stores[0].writes, 0);
    // In host memory.
    let pin = engine.cache.cache_mut().pin_prefix(&there, plain());
    assert_eq!(pin.tokens, 600);
    poll_until_written(&mut engine, 2);
    // On the device alone.
    let second = engine.cache.cache_mut().pin_prefix(&gone, plain());
    poll_until_written(&mut engine, 4);
    for pin in [pin, second] {
        assert!(engine.cache.cache_mut().unpin(pin.id).unwrap());
    }
    // Nothing is written twice, and nothing that is not pinned any more.
    engine.run(&other, plain());
    engine.cache.cache_mut().pin_prefix(&there, plain());
    engine.flush();
    let stats = engine.cache.stats();
    assert_eq!(stats.stores[0].writes, 4, "{stats:?}");
}
