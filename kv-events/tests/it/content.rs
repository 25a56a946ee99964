//! What consumers know is what the cache has.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::backend::NullBackend;
use kv_core::events::{EventKind, StoredBlock, Tier};
use kv_core::reuse::BlockKey;
use kv_core::{Axes, CacheSpec, GroupId, KvCache, SequenceId, StartOptions, StepInput, TensorView};
use kv_events::{PublisherOptions, Wire};

use crate::client::{Batch, Client};
use crate::consumer::Consumer;
use crate::support::{
    bind, events, has, hash, on, options, prompt, removed, salted_prompt, stored, subscribe, until,
    wait_until,
};
use crate::value::Value;

const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Store];

fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "GPU",
        Tier::Host => "CPU",
        _ => "STORAGE",
    }
}

/// Blocks with the tiers that have them: what the cache has.
#[derive(Default)]
struct Contents(BTreeMap<u128, (StoredBlock, BTreeSet<usize>)>);

impl Contents {
    /// Returns the blocks whose parents are all there, with their media: a router can use no other.
    fn reachable(&self) -> BTreeMap<u64, BTreeSet<String>> {
        let mut found = BTreeMap::new();
        for (block, tiers) in self.0.values() {
            let mut at = block;
            while at.index > 0 {
                match self.0.get(&at.parent.0) {
                    Some((parent, _)) => at = parent,
                    None => break,
                }
            }
            if at.index == 0 {
                let media = tiers.iter().map(|tier| medium(TIERS[*tier]).to_owned());
                found.insert(hash(block), media.collect());
            }
        }
        found
    }
}

/// Returns the blocks that a router can reach from the first block of a prompt.
fn reachable(consumer: &Consumer) -> BTreeMap<u64, BTreeSet<String>> {
    let is_reached = |hash: &u64| {
        let mut at = Some(*hash);
        while let Some(hash) = at {
            let Some(known) = consumer.blocks.get(&hash) else { return false };
            at = known.parent;
        }
        true
    };
    let reached = consumer.blocks.iter().filter(|(hash, _)| is_reached(hash));
    reached.map(|(hash, known)| (*hash, known.media.clone())).collect()
}

/// Random stores and removals on all tiers, in any order, with clears and snapshots between.
#[test]
fn random_steps_leave_a_router_with_what_the_cache_has() {
    let publisher = bind(&options().snapshot_spacing(Duration::ZERO));
    let mut client = subscribe(&publisher);
    let mut asker = Client::new(publisher.addresses().replay.unwrap(), "DEALER", 1);
    let prompts: Vec<_> = (1..5).map(|seed| prompt(seed, 6)).collect();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = move |bound: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random % u64::try_from(bound).unwrap()).unwrap()
    };
    let mut contents = Contents::default();
    let mut consumer = Consumer::default();
    for step in 0..1000 {
        let mut kinds = Vec::new();
        for _ in 0..below(8) {
            let tier = below(4);
            let block = &prompts[below(4)][below(6)];
            let block = StoredBlock { tier: TIERS[tier], ..block.clone() };
            let has = contents.0.get(&block.key.0).is_some_and(|(_, tiers)| tiers.contains(&tier));
            if has && below(2) == 0 {
                let (_, tiers) = contents.0.get_mut(&block.key.0).unwrap();
                tiers.remove(&tier);
                let StoredBlock { group, key, tier, .. } = block;
                kinds.push(EventKind::Removed { group, key, tier });
            } else if !has {
                let entry = contents.0.entry(block.key.0);
                entry.or_insert((block.clone(), BTreeSet::new())).1.insert(tier);
                kinds.push(EventKind::Stored(block));
            }
            contents.0.retain(|_, (_, tiers)| !tiers.is_empty());
        }
        if below(25) == 0 {
            let tier = below(4);
            kinds.push(EventKind::Cleared { tier: TIERS[tier] });
            contents.0.values_mut().for_each(|(_, tiers)| {
                tiers.remove(&tier);
            });
            contents.0.retain(|_, (_, tiers)| !tiers.is_empty());
        }
        publisher.publish(&events(kinds));
        if below(40) == 0 {
            assert_eq!(asker.replay(&[b""], 0), []);
        }
        if step % 5 == 0 {
            let expected = contents.reachable();
            let mut patience = 2000;
            while reachable(&consumer) != expected {
                consumer.apply(&client.batch());
                patience -= 1;
                assert!(patience > 0, "{:?}\n{expected:?}", reachable(&consumer));
            }
        }
    }
    assert_eq!(consumer.skipped, 0, "no event is one that a router skips");
    assert!(consumer.runs > 1000);
    assert!(publisher.stats().snapshots > 2);
}

#[test]
fn a_prompt_is_one_event_and_its_fields_are_those_of_vllm() {
    let publisher = bind(&options().rank(3));
    let mut client = subscribe(&publisher);
    let blocks = prompt(1, 3);
    publisher.publish(&stored(&blocks));
    let batch = until(&mut client, |batch| has(batch, "BlockStored")).pop().unwrap();
    assert_eq!(Value::read(&batch.payload).items()[2], Value::Uint(3));
    let [event] = batch.events().try_into().unwrap();
    let keys = [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "group_idx",
        "kv_cache_spec_kind",
    ];
    assert_eq!(event.keys(), keys);
    let hashes: Vec<_> = event.get("block_hashes").items().iter().map(Value::uint).collect();
    assert_eq!(hashes, blocks.iter().map(hash).collect::<Vec<_>>());
    let tokens: Vec<_> = event.get("token_ids").items().iter().map(Value::uint).collect();
    assert!(tokens.into_iter().eq(1000..1012));
    for nil in ["parent_block_hash", "lora_id", "lora_name"] {
        assert_eq!(event.get(nil), &Value::Nil);
    }
    assert_eq!(event.get("block_size").uint(), 4);
    publisher.publish(&stored(&on(Tier::Host, &blocks[1..])));
    publisher.publish(&removed(&blocks));
    let batches = until(&mut client, |batch| has(batch, "BlockRemoved"));
    let events: Vec<_> = batches.iter().flat_map(Batch::events).collect();
    let lower = events.iter().find(|event| event.get("type").str() == "BlockStored").unwrap();
    assert_eq!(lower.get("medium").str(), "CPU");
    assert_eq!(lower.get("parent_block_hash").uint(), hash(&blocks[0]));
    assert_eq!(lower.get("token_ids").items().len(), 8);
    let gone = events.last().unwrap();
    assert_eq!((gone.get("medium").str(), gone.get("block_hashes").items().len()), ("GPU", 3));
}

#[test]
fn arrays_have_the_same_values_in_order() {
    let publisher = bind(&options().wire(Wire::Array));
    let mut client = subscribe(&publisher);
    assert_eq!(
        client.batch().events(),
        [Value::List(vec![Value::Text("AllBlocksCleared".into())])]
    );
    let blocks = prompt(1, 2);
    publisher.publish(&stored(&blocks));
    let kind = |batch: &Batch| batch.events().first().map(|event| event.items()[0].clone());
    let is =
        |name: &'static str| move |batch: &Batch| kind(batch) == Some(Value::Text(name.into()));
    let batch = until(&mut client, is("BlockStored")).pop().unwrap();
    let hashes = Value::List(blocks.iter().map(|block| Value::Uint(hash(block))).collect());
    let expected = vec![
        Value::Text("BlockStored".into()),
        hashes.clone(),
        Value::Nil,
        Value::List((1000..1008).map(Value::Uint).collect()),
        Value::Uint(4),
        Value::Nil,
        Value::Text("GPU".into()),
        Value::Nil,
    ];
    assert_eq!(batch.events(), [Value::List(expected)]);
    publisher.publish(&removed(&blocks));
    let batch = until(&mut client, is("BlockRemoved")).pop().unwrap();
    let expected = vec![Value::Text("BlockRemoved".into()), hashes, Value::Text("GPU".into())];
    assert_eq!(batch.events(), [Value::List(expected)]);
}

#[test]
fn salted_blocks_and_those_of_adapters_are_published_on_request_alone() {
    let salted = salted_prompt(1, 2, b"tenant-secret", None);
    let bytes = salted_prompt(2, 2, &[0xff, 1], None);
    let adapter = salted_prompt(3, 2, b"", Some(12));
    let all = [salted.clone(), bytes, adapter, prompt(4, 2)].concat();
    let contains =
        |batch: &Batch, text: &[u8]| batch.payload.windows(text.len()).any(|part| part == text);
    let off = bind(&options());
    let mut client = subscribe(&off);
    off.publish(&stored(&all));
    off.publish(&removed(&salted));
    let batches = until(&mut client, |batch| has(batch, "BlockStored"));
    for batch in batches.into_iter().chain((0..3).map(|_| client.batch())) {
        assert!(!contains(&batch, b"secret") && !contains(&batch, b"salt"));
        for block in &all[..6] {
            assert!(!contains(&batch, &hash(block).to_be_bytes()));
            // The tokens of its first block, as MessagePack has them.
            assert!(!contains(&batch, &[0xcd, 0x03, 0xe8, 0xcd, 0x03, 0xe9]));
        }
    }
    assert_eq!(off.stats().blocks, 2);

    let publisher = bind(&options().salted(true).adapters(true));
    let mut client = subscribe(&publisher);
    publisher.publish(&stored(&all));
    let batch = until(&mut client, |batch| has(batch, "BlockStored")).pop().unwrap();
    let [text, hex, adapter, plain] = batch.events().try_into().unwrap();
    for (event, tag) in [(text, "tenant-secret"), (hex, "ff01")] {
        let tag = Value::Text(format!("dynamo-cache-salt:{tag}"));
        let keys = Value::List(vec![Value::List(vec![tag]), Value::Nil]);
        assert_eq!(event.get("extra_keys"), &keys);
        assert_eq!(event.get("lora_id"), &Value::Nil);
    }
    assert_eq!(adapter.get("lora_id").uint(), 12);
    assert_eq!(adapter.get("lora_name").str(), "12");
    assert!(!adapter.keys().contains(&"extra_keys") && !plain.keys().contains(&"extra_keys"));
    assert_eq!(publisher.stats().blocks, 8);
}

#[test]
fn blocks_that_tokens_do_not_identify_are_not_published() {
    let publisher = bind(&options());
    let mut with_image = prompt(1, 2);
    with_image[0].key = BlockKey(5);
    with_image[1].parent = BlockKey(5);
    with_image[1].key = BlockKey(5).child(&with_image[1].tokens, &[]);
    let other_group: Vec<_> =
        prompt(2, 2).into_iter().map(|block| StoredBlock { group: GroupId(1), ..block }).collect();
    let mut short = prompt(3, 1);
    short[0].tokens = short[0].tokens[..3].into();
    short[0].key = short[0].parent.child(&short[0].tokens, &[]);
    publisher.publish(&stored(&[with_image, other_group, short, prompt(4, 1)].concat()));
    wait_until(|| publisher.stats().blocks > 0);
    assert_eq!(publisher.stats().blocks, 1);
}

/// A real cache: its keys are those that the publisher expects.
#[test]
fn the_blocks_of_a_cache_are_published() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(1).paged(4, 8).events(100);
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    let options = PublisherOptions::new(cache.state().spec()).endpoint("tcp://127.0.0.1:0");
    let publisher = bind(&options.heartbeat(Duration::from_millis(20)));
    let mut client = subscribe(&publisher);
    let tokens: Vec<u32> = (0..19).collect();
    fill(&mut cache, 1, &tokens);
    publisher.publish(&cache.take_events());
    wait_until(|| publisher.stats().blocks == 4);
    let mut consumer = Consumer::default();
    while consumer.blocks.len() < 4 {
        consumer.apply(&client.batch());
    }
    let expected = cache.state().snapshot();
    assert!(expected.blocks.iter().all(|block| consumer.blocks.contains_key(&hash(block))));
    // Another prompt evicts them.
    fill(&mut cache, 2, &(100..130).collect::<Vec<_>>());
    publisher.publish(&cache.take_events());
    let hashes = |cache: &KvCache<NullBackend>| -> BTreeSet<u64> {
        cache.state().snapshot().blocks.iter().map(hash).collect()
    };
    while consumer.blocks.keys().copied().collect::<BTreeSet<_>>() != hashes(&cache) {
        consumer.apply(&client.batch());
    }
    assert!(consumer.blocks.values().any(|known| known.tokens == [100, 101, 102, 103]));
}

/// Computes a prompt, and ends it.
fn fill(cache: &mut KvCache<NullBackend>, id: u64, tokens: &[u32]) {
    let id = SequenceId(id);
    cache.start(id, tokens, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(id, tokens)]).unwrap();
    let rows = vec![0_f32; tokens.len()];
    let dims = [u32::try_from(tokens.len()).unwrap(), 1, 1];
    let rows = TensorView::host(&rows, &dims);
    step.write(0, rows, rows, Axes::Thd).unwrap();
    step.commit().unwrap();
    cache.release(id).unwrap();
}
