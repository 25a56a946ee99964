//! Dynamo's indexer follows random operation sequences over its sockets, and knows what every tier
//! has of a prompt. `cargo xtask fleet` starts one and runs this.
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::GroupId;
use kv_core::events::{Snapshot, StoredBlock, Tier};
use kv_core::reuse::BlockKey;
use kv_events::{Publisher, PublisherOptions};
use kv_testkit::rng::Rng;
use kv_tier::{BlockStore, DiskOptions, DiskStore};
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::prompt::Asked;
use crate::world::World;

/// Steps of all kinds of caches together, and questions.
const STEPS: u32 = 10_000;
const QUESTIONS: u32 = 1000;
/// Steps of one cache.
const STEPS_OF_RUN: u32 = 250;
/// Longest until the indexer knows what was published: two live snapshots may be due, the second of
/// which waits for its time.
const PATIENCE: Duration = Duration::from_secs(3);
const SPACING: Duration = Duration::from_millis(200);

/// An indexer, reached over HTTP.
struct Indexer(SocketAddr);

impl Indexer {
    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let mut stream = TcpStream::connect(self.0).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Connection: close\r\nContent-Length: {}\r\n\r\n",
            self.0,
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_default())
    }

    fn register(&self, run: u64, block_size: u32, publisher: &Publisher) {
        let addresses = publisher.addresses();
        let body = json!({
            "instance_id": run,
            "model_name": model_of(run),
            "block_size": block_size,
            "endpoint": format!("tcp://{}", addresses.events),
            "replay_endpoint": format!("tcp://{}", addresses.replay.unwrap()),
        });
        let (status, answer) = self.post("/register", &body);
        assert_eq!(status, 201, "{answer}");
    }

    /// Returns the tokens of a prompt that are on the device, from there on in host memory, and
    /// from there on in stores.
    fn known(&self, run: u64, prompt: &[u32]) -> [u32; 3] {
        let body = json!({ "model_name": model_of(run), "token_ids": prompt });
        let (status, answer) = self.post("/query", &body);
        assert_eq!(status, 200, "{answer}");
        let known = &answer["instances"][run.to_string()];
        ["gpu", "cpu", "disk"].map(|tier| known[tier].as_u64().unwrap_or(0) as u32)
    }
}

/// Names a run's cache.
fn model_of(run: u64) -> String {
    format!("run {run}")
}

/// Chooses a prompt: any, or one that ends with a block that some tier has.
fn question(rng: &mut Rng, snapshot: &Snapshot) -> Vec<u32> {
    let tier = rng.pick(&[Tier::Device, Tier::Host, Tier::Disk]);
    let is_indexed = |block: &&StoredBlock| {
        block.group == GroupId(0) && block.salt.is_empty() && block.adapter.is_none()
    };
    let blocks: Vec<_> = snapshot.blocks.iter().filter(is_indexed).collect();
    let of_tier: Vec<_> = blocks.iter().filter(|block| block.tier == tier).collect();
    if of_tier.is_empty() {
        return Asked::choose(rng).prompt;
    }
    let mut block = Some(of_tier[rng.below(of_tier.len() as u32) as usize]);
    let mut chain = Vec::new();
    while let Some(of) = block {
        chain.push(&of.tokens[..]);
        block = blocks.iter().find(|block| block.key == of.parent);
    }
    chain.reverse();
    chain.concat()
}

/// Returns the same of what the cache and its tiers say they have.
fn truth(snapshot: &Snapshot, prompt: &[u32], block_size: u32) -> [u32; 3] {
    let mut parents: Option<Vec<BlockKey>> = None;
    let mut on: Vec<Vec<Tier>> = Vec::new();
    for (index, tokens) in (0..).zip(prompt.chunks_exact(block_size as usize)) {
        let fits = |block: &&StoredBlock| {
            (block.group, block.index, block.adapter) == (GroupId(0), index, None)
                && block.salt.is_empty()
                && *block.tokens == *tokens
                // An image in the block makes another key.
                && block.parent.child(tokens, &[]) == block.key
                && parents.as_ref().is_none_or(|parents| parents.contains(&block.parent))
        };
        let found: Vec<_> = snapshot.blocks.iter().filter(fits).collect();
        on.push(found.iter().map(|block| block.tier).collect());
        parents = Some(found.iter().map(|block| block.key).collect());
    }
    let mut blocks = on.into_iter().peekable();
    let mut end = 0;
    let tiers: [&[Tier]; 3] = [&[Tier::Device], &[Tier::Host], &[Tier::Disk, Tier::Store]];
    tiers.map(|tiers| {
        while blocks.next_if(|on| on.iter().any(|tier| tiers.contains(tier))).is_some() {
            end += block_size;
        }
        end
    })
}

#[test]
#[ignore = "asks Dynamo's indexer at KV_INDEXER, which `cargo xtask fleet` starts"]
fn an_indexer_knows_what_every_tier_has() {
    let indexer = Indexer(std::env::var("KV_INDEXER").unwrap().parse().unwrap());
    let seed = std::env::var("KV_TIER_SEED").map_or(1, |seed| seed.parse().unwrap());
    let (mut asked, mut by_tier) = (0, [0_u32; 3]);
    for run in 0.. {
        let mut rng = Rng::new(seed + run);
        let kind = rng.pick(&Kind::ALL);
        let spec = kind.spec(&mut rng);
        let options = PublisherOptions::new(&spec)
            .endpoint("tcp://127.0.0.1:0")
            .replay_endpoint("tcp://127.0.0.1:0")
            .heartbeat(Duration::from_millis(50))
            .snapshot_spacing(SPACING);
        if options.unindexed().is_some() {
            continue;
        }
        let block_size = spec.groups()[0].block_size();
        let folder = tempfile::tempdir().unwrap();
        let stores = ["one", "two"].map(|name| -> Arc<dyn BlockStore> {
            let options = DiskOptions::new(64 << 20).with_floor(0);
            Arc::new(DiskStore::open(folder.path().join(name), options).unwrap())
        });
        let mut world = World::over(rng, seed + run, (kind, spec), stores);
        let publisher = world.publish(Publisher::bind(&options).unwrap());
        indexer.register(run, block_size, &publisher);
        for step in 1..=STEPS_OF_RUN {
            world.act();
            if step % (STEPS / QUESTIONS) > 0 {
                continue;
            }
            let snapshot = world.read_events();
            let prompt = question(&mut world.rng, &snapshot);
            let truth = truth(&snapshot, &prompt, block_size);
            let end = Instant::now() + PATIENCE;
            loop {
                let known = indexer.known(run, &prompt);
                if known == truth {
                    break;
                }
                assert!(
                    Instant::now() < end,
                    "{kind:?}, seed {}, step {step}: the indexer knows {known:?} and not {truth:?} \
                     tokens of {prompt:?}; {:?}, {}",
                    seed + run,
                    publisher.stats(),
                    world.log.join(", ")
                );
                std::thread::sleep(Duration::from_millis(2));
            }
            asked += 1;
            let mut before = 0;
            for (count, end) in by_tier.iter_mut().zip(truth) {
                *count += u32::from(end > before);
                before = end;
            }
        }
        if asked >= QUESTIONS {
            break;
        }
    }
    println!(
        "{asked} questions; answers with tokens on device, in host memory, in stores: {by_tier:?}"
    );
    // Whole chunks on disk alone are rare: host memory has them too.
    let least = [QUESTIONS / 20, QUESTIONS / 40, 0];
    assert!(by_tier.iter().zip(least).all(|(count, least)| *count >= least), "{by_tier:?}");
}
