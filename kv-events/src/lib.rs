//! Publishes what a KV cache can reuse, so that routers find the instance that has a prefix.
//!
//! The contract is vLLM's: batches of events in MessagePack over a socket PUB of ZeroMQ, and a
//! socket ROUTER for batches of the past. vllm-router, Dynamo's indexer and others read it and hash
//! the tokens of the events themselves. The wire is written here: no library of ZeroMQ is needed.
//!
//! | to | see |
//! |---|---|
//! | publish | [`Publisher::bind`], [`Publisher::publish`], [`PublisherOptions`] |
//! | begin anew after lost events | [`Publisher::needs_snapshot`], [`Publisher::reset`] |
//! | know whether routers can index a cache | [`PublisherOptions::unindexed`], [`Unindexed`] |
//! | choose what consumers understand | [`Wire`], [`PublisherOptions::salted`] |
//! | watch it | [`Publisher::stats`], [`Publisher::addresses`] |
//!
//! ```
//! use kv_core::backend::NullBackend;
//! use kv_core::{CacheSpec, KvCache};
//! use kv_events::{Publisher, PublisherOptions};
//!
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(1).paged(16, 64).events(1000);
//! let mut cache = KvCache::new(NullBackend::new(), spec.build()?)?;
//! let options = PublisherOptions::new(cache.state().spec()).endpoint("tcp://127.0.0.1:0");
//! assert_eq!(options.unindexed(), None, "routers index this cache");
//! let publisher = Publisher::bind(&options)?;
//! println!("events at tcp://{}", publisher.addresses().events);
//!
//! // After every step:
//! publisher.publish(&cache.take_events());
//! if publisher.needs_snapshot() {
//!     publisher.reset(&cache.state().snapshot());
//! }
//! assert_eq!(publisher.stats().dropped_events, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is sent
//!
//! A message has three frames: the topic, a number (8 bytes, big endian), and a batch: the list
//! `[seconds since 1970, events, rank]`. With [`Wire::Map`] an event is a map with the key `type`:
//!
//! - `BlockStored` with `block_hashes`, `parent_block_hash` (nil for the first block of a prompt),
//!   `token_ids`, `block_size`, `lora_id`, `medium`, `lora_name`, with a salt `extra_keys`,
//!   `group_idx` (0), and `kv_cache_spec_kind` (`full_attention`),
//! - `BlockRemoved` with `block_hashes`, `medium`, and `group_idx`,
//! - `AllBlocksCleared`,
//!
//! and with [`Wire::Array`] the same values in this order, without the last two keys of stored and
//! the last one of removed blocks. The hash of a block is the low 64 bits of its
//! [`BlockKey`](kv_core::reuse::BlockKey). The medium is `GPU` for content on the device, `CPU` in
//! host memory, and `STORAGE` on disk or in a store. A batch has at most 1 MiB and 4,096 events.
//!
//! # What a consumer knows
//!
//! Numbers begin at the milliseconds since 1970 times 2^20, so that those of a later life of the
//! process are larger. A batch goes out at least every half second, without events or, while
//! nothing can be reused, with `AllBlocksCleared`. A consumer that misses a number asks the replay
//! socket: its request is an envelope of frames and the number to begin with, its answer every
//! batch from there behind the same envelope, and the number -1 with an empty payload. If those
//! batches are not kept any more, or are of another life, -1 comes at once and everything follows
//! as a *live snapshot* to all subscribers: `AllBlocksCleared`, and all blocks, parents first. Live
//! snapshots are at least five seconds apart.
//!
//! # Limits
//!
//! Events have the tokens of prompts in clear, and ZeroMQ's mechanism NULL knows no passwords:
//! publish on the loopback interface or in a network of trust. A socket has at most 16 peers, a
//! frame from outside 64 KiB, a peer 64 subscriptions and five seconds for its handshake. A
//! subscriber that does not read delays nobody: once 64 MiB wait for it, it loses batches.
#![forbid(unsafe_code)]

mod inbox;
mod mirror;
mod msgpack;
mod options;
mod outbox;
mod peer;
mod publisher;
mod replay;
mod server;
mod stats;
mod store;
mod wire;
pub mod zmtp;

pub use options::{BindError, PublisherOptions, Unindexed};
pub use publisher::{Addresses, Publisher};
pub use stats::Stats;
pub use wire::Wire;
