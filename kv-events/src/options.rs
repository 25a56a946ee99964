//! What a publisher publishes, and where.
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use std::{fmt, io};

use kv_core::{CacheSpec, GroupId};

use crate::mirror::Published;
use crate::wire::{BLOCK_TOKENS_MAX, Format, Wire};

/// Settings of a [`Publisher`](crate::Publisher).
///
/// Without further calls: `tcp://127.0.0.1:5557`, no replay, the empty topic, maps, neither salted
/// blocks nor those of adapters, a heartbeat every half second, at most one live snapshot in five
/// seconds and none without a reason, rank 0.
///
/// Events are prompts in clear, without authentication: whoever reaches the port reads them.
#[derive(Debug, Clone)]
pub struct PublisherOptions {
    group: Result<(GroupId, u32), Unindexed>,
    pub(crate) endpoint: String,
    pub(crate) replay_endpoint: Option<String>,
    pub(crate) topic: Vec<u8>,
    wire: Wire,
    salted: bool,
    adapters: bool,
    rank: u32,
    pub(crate) heartbeat: Duration,
    pub(crate) snapshot_spacing: Duration,
    pub(crate) resync: Option<Duration>,
    pub(crate) queued_events: usize,
    pub(crate) subscriber_bytes: usize,
    pub(crate) kept_batches: usize,
    pub(crate) kept_bytes: usize,
}

/// Why no consumer could index the blocks of a cache. Its publisher sends heartbeats alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unindexed {
    /// Every layer has a recurrent state: there are no blocks of rows.
    NoRows,
    /// Every group of layers has a window: consumers give such blocks no credit.
    WindowsAlone,
    /// The blocks of a sequence have different numbers of tokens, because its first tokens are kept
    /// in 16 bits.
    UnevenBlocks,
    /// A block is a whole sequence, or has more than 131,072 tokens.
    BlockSize,
}

impl fmt::Display for Unindexed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRows => "the cache has no blocks of rows, which routers index",
            Self::WindowsAlone => "every group of layers has a window, and routers index none",
            Self::UnevenBlocks => "blocks have different numbers of tokens (full_precision_prefix)",
            Self::BlockSize => "a block is a whole sequence or longer than 131,072 tokens",
        })
    }
}

impl PublisherOptions {
    /// Publishes the blocks of a cache: those of its first group of layers without a window, as
    /// vLLM's group 0. Consumers give others no credit. Snapshots of recurrent states are not
    /// published. A block whose key depends on more than its tokens, such as an image, is not
    /// published either.
    pub fn new(spec: &CacheSpec) -> Self {
        Self {
            group: indexed_group(spec),
            endpoint: "tcp://127.0.0.1:5557".into(),
            replay_endpoint: None,
            topic: Vec::new(),
            wire: Wire::default(),
            salted: false,
            adapters: false,
            rank: 0,
            heartbeat: Duration::from_millis(500),
            snapshot_spacing: Duration::from_secs(5),
            resync: None,
            queued_events: 100_000,
            subscriber_bytes: 64 << 20,
            kept_batches: 10_000,
            kept_bytes: 64 << 20,
        }
    }

    /// Returns why consumers could index none of the cache's blocks; `None` if they can.
    ///
    /// ```
    /// use kv_core::CacheSpec;
    /// use kv_events::{PublisherOptions, Unindexed};
    ///
    /// let spec = || CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(16, 8);
    /// assert_eq!(PublisherOptions::new(&spec().build()?).unindexed(), None);
    /// let windows = spec().window_left(64).build()?;
    /// let unindexed = PublisherOptions::new(&windows).unindexed();
    /// assert_eq!(unindexed, Some(Unindexed::WindowsAlone));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unindexed(&self) -> Option<Unindexed> {
        self.group.err()
    }

    /// Publishes at `tcp://HOST:PORT`. The host is a name, an address (of IPv6 in brackets), or `*`
    /// for every address of IPv4; port 0 takes a free one.
    #[must_use]
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = endpoint.into();
        self
    }

    /// Answers requests for batches of the past at an address like [`Self::endpoint`]. Without one,
    /// a new subscriber causes a live snapshot instead.
    #[must_use]
    pub fn replay_endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.replay_endpoint = Some(endpoint.into());
        self
    }

    /// Sets the topic of every batch, such as `kv@POD@MODEL` for llm-d. vllm-router 0.1.17 takes
    /// the empty topic alone from sources that its command line names.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<Vec<u8>>) -> Self {
        self.topic = topic.into();
        self
    }

    /// Sets how events are written.
    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Sets whether blocks of salted prompts are published, with Dynamo's tag
    /// `dynamo-cache-salt:SALT` (in hexadecimal if the salt is not UTF-8) as extra key of the first
    /// block of an event. Consumers that do not know the tag credit such blocks to prompts without
    /// a salt or refuse the batch, and the salt is sent in clear: set it where Dynamo alone reads.
    /// Blocks with salts of more than 4,096 bytes are never published.
    #[must_use]
    pub fn salted(mut self, salted: bool) -> Self {
        self.salted = salted;
        self
    }

    /// Sets whether blocks of adapters are published, with the adapter's number as `lora_id` and
    /// its decimal form as `lora_name`. Releases of vllm-router refuse every batch that has one:
    /// set it where all consumers tell adapters apart.
    #[must_use]
    pub fn adapters(mut self, adapters: bool) -> Self {
        self.adapters = adapters;
        self
    }

    /// Sets the data-parallel rank in every batch. Consumers that know one rank a port want 0.
    #[must_use]
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = rank;
        self
    }

    /// Sets the longest time without a batch, in which a consumer that lost one notices; at least a
    /// millisecond.
    #[must_use]
    pub fn heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = heartbeat.max(Duration::from_millis(1));
        self
    }

    /// Sets the shortest time between two live snapshots, which all subscribers see.
    #[must_use]
    pub fn snapshot_spacing(mut self, spacing: Duration) -> Self {
        self.snapshot_spacing = spacing;
        self
    }

    /// Publishes a live snapshot again and again, this time apart: for consumers without replay.
    /// The spacing of snapshots applies.
    #[must_use]
    pub fn resync(mut self, interval: Option<Duration>) -> Self {
        self.resync = interval;
        self
    }

    /// Sets the most events that wait for the publisher's thread; what comes beyond is dropped, and
    /// [`Publisher::needs_snapshot`](crate::Publisher::needs_snapshot) says so.
    #[must_use]
    pub fn queued_events(mut self, events: usize) -> Self {
        self.queued_events = events;
        self
    }

    /// Sets the most bytes that wait for one subscriber; batches beyond are dropped for it, and it
    /// sees a gap in their numbers. Subscribers share the bytes.
    #[must_use]
    pub fn subscriber_bytes(mut self, bytes: usize) -> Self {
        self.subscriber_bytes = bytes;
        self
    }

    /// Sets the most batches, and the most bytes of batches, that are kept for replay.
    #[must_use]
    pub fn kept(mut self, batches: usize, bytes: usize) -> Self {
        (self.kept_batches, self.kept_bytes) = (batches, bytes);
        self
    }

    pub(crate) fn published(&self) -> Published {
        Published {
            group: self.group.ok().map(|(group, _)| group),
            block_size: self.block_size(),
            salted: self.salted,
            adapters: self.adapters,
        }
    }

    pub(crate) fn format(&self) -> Format {
        Format { wire: self.wire, block_size: self.block_size(), rank: self.rank }
    }

    fn block_size(&self) -> u32 {
        self.group.map_or(0, |(_, block_size)| block_size)
    }
}

/// Returns the group whose blocks consumers can index, and its block size.
fn indexed_group(spec: &CacheSpec) -> Result<(GroupId, u32), Unindexed> {
    let mut groups = (0..=u8::MAX).map(GroupId).zip(spec.groups());
    let without_window = groups.find(|(_, group)| group.window().is_none());
    let Some((id, group)) = without_window else {
        let is_empty = spec.groups().is_empty();
        return Err(if is_empty { Unindexed::NoRows } else { Unindexed::WindowsAlone });
    };
    if group.slot_map().full_precision_prefix() > 0 {
        Err(Unindexed::UnevenBlocks)
    } else if group.is_contiguous() || group.block_size() > BLOCK_TOKENS_MAX {
        Err(Unindexed::BlockSize)
    } else {
        Ok((id, group.block_size()))
    }
}

/// Why a publisher could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The text of an endpoint is not `tcp://HOST:PORT`.
    #[error("endpoint `{endpoint}`: {problem}")]
    Endpoint {
        /// The text.
        endpoint: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The host has no address, or the system refuses the port: it is in use, or reserved.
    #[error("endpoint `{endpoint}`: {source}")]
    Bind {
        /// The text.
        endpoint: String,
        /// The system's error.
        source: io::Error,
    },
    /// The system starts no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

/// Returns the addresses of an endpoint.
pub(crate) fn resolve(endpoint: &str) -> Result<Vec<SocketAddr>, BindError> {
    let refuse = |problem| BindError::Endpoint { endpoint: endpoint.into(), problem };
    let rest =
        endpoint.strip_prefix("tcp://").ok_or_else(|| refuse("does not begin with tcp://"))?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(|| refuse("has no port"))?;
    let port: u16 = port.parse().map_err(|_| refuse("the port is not a number up to 65535"))?;
    let host = match host {
        "" => return Err(refuse("has no host")),
        "*" => "0.0.0.0",
        host => match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']').ok_or_else(|| refuse("has no closing bracket"))?,
            None if host.contains(':') => {
                return Err(refuse("an address of IPv6 needs brackets"));
            }
            None => host,
        },
    };
    let found = (host, port).to_socket_addrs();
    let found = found.map_err(|source| BindError::Bind { endpoint: endpoint.into(), source })?;
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_or_refused_by_what_is_wrong() {
        for (endpoint, expected) in [
            ("tcp://127.0.0.1:0", "127.0.0.1:0"),
            ("tcp://*:5557", "0.0.0.0:5557"),
            ("tcp://[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(resolve(endpoint).unwrap(), [expected.parse().unwrap()], "{endpoint}");
        }
        for (endpoint, expected) in [
            ("ipc:///run/kv", "does not begin with tcp://"),
            ("tcp://localhost", "has no port"),
            ("tcp://:80", "has no host"),
            ("tcp://::1:80", "an address of IPv6 needs brackets"),
            ("tcp://[::1:80", "has no closing bracket"),
            ("tcp://localhost:65536", "the port is not a number up to 65535"),
            ("tcp://localhost:*", "the port is not a number up to 65535"),
        ] {
            let error = resolve(endpoint).unwrap_err();
            assert_eq!(error.to_string(), format!("endpoint `{endpoint}`: {expected}"));
        }
    }

    #[test]
    fn one_group_without_a_window_is_published() {
        let group = |options: PublisherOptions| options.published().group;
        let one = || CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
        let plain = PublisherOptions::new(&one().paged(4, 8).build().unwrap());
        assert_eq!(plain.format().block_size, 4);
        assert_eq!((plain.unindexed(), group(plain)), (None, Some(GroupId(0))));
        let mixed = CacheSpec::builder()
            .layers(2)
            .group([0], |g| g.kv_heads(1).head_dim(2).paged(4, 8).window_left(8))
            .group([1], |g| g.kv_heads(1).head_dim(2).paged(8, 8));
        let mixed = PublisherOptions::new(&mixed.build().unwrap());
        assert_eq!(mixed.format().block_size, 8);
        assert_eq!(group(mixed), Some(GroupId(1)));
        let contiguous = PublisherOptions::new(&one().contiguous(2, 64).build().unwrap());
        assert_eq!(contiguous.unindexed(), Some(Unindexed::BlockSize));
        let windows = PublisherOptions::new(&one().paged(4, 8).window_left(8).build().unwrap());
        assert_eq!(windows.unindexed(), Some(Unindexed::WindowsAlone));
        assert!(windows.unindexed().unwrap().to_string().contains("window"));
        assert_eq!(group(windows), None);
    }
}
