//! A store in S3, or in any service with its protocol, through the crate `object_store`.
//!
//! One object holds one chunk. Requests run on a tokio runtime with one thread, which is hidden:
//! the methods block, and may be called on any thread, also on one of another runtime.
//!
//! # Deadlines
//! A call that is not done at its deadline is dropped, and its connection is closed. A write that
//! is still being signed then continues on another thread until it is signed, and sends nothing.
//! The library's own retries are off: callers know how long an answer is worth waiting for.
//!
//! # What the bucket must be set to
//! A bucket never evicts. Set a lifecycle rule that expires objects below the prefix after some
//! days; hot chunks that expire are written again. Writes are conditional (`If-None-Match`), so a
//! chunk that is there is not sent twice over a slow link; each carries a CRC-64/NVME, with which
//! the server refuses what was damaged on the way.
//!
//! # Security
//! Whoever can write to the bucket can forge chunks: checksums find decay, not malice. Give
//! untrusted readers credentials with `s3:GetObject` only.
// Reads replies that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
mod http;
mod runtime;

use std::env;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use kv_core::events::Tier;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    ClientOptions, Error as ObjectError, GetOptions, GetRange, ObjectMeta, ObjectStore as Backend,
    ObjectStoreExt as _, PutMode, PutOptions, PutPayloadMut, RetryConfig,
};
use url::Url;

use crate::listing::{ListChunks, Listed, ListedChunk, deadline, remove_listed};
use crate::remote::{
    Parameters, StoreUrlError, chunk_path, parse_chunk_path, parse_url, time_left,
};
use crate::store::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};
use http::Connector;
use runtime::Runtime;

/// A store in an S3 bucket.
pub struct ObjectStore {
    backend: Arc<dyn Backend>,
    prefix: Path,
    runtime: Runtime,
}

impl ObjectStore {
    /// Creates a store of a URL, without a connection, with credentials from the environment:
    /// `s3://bucket[/prefix][?endpoint=..&region=..&allow_http=..]`.
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `endpoint` | URL of the server | AWS |
    /// | `region` | region of the bucket | `us-east-1` |
    /// | `allow_http` | `true`: the endpoint may be without TLS | `false` |
    ///
    /// Variables are those of `object_store`: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_SESSION_TOKEN`, `AWS_SKIP_SIGNATURE=true` for a server without users, and others that
    /// begin with `AWS_`. Without any, credentials of the machine are requested from AWS.
    ///
    /// `memory:///prefix` is a store in memory, for tests of a caller.
    ///
    /// # Errors
    /// [`StoreUrlError`] for a URL of another form, an unknown or repeated parameter, and settings
    /// that contradict each other.
    pub fn from_url(url: &str) -> Result<Self, StoreUrlError> {
        let variables = env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::with_variables(url, variables)
    }

    /// Creates a store of a URL with these variables instead of the environment's.
    ///
    /// # Errors
    /// As [`Self::from_url`].
    pub fn with_variables(
        url: &str,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, StoreUrlError> {
        let url = parse_url(url)?;
        let backend: Arc<dyn Backend> = match url.scheme() {
            "s3" => Arc::new(s3(&url, variables)?),
            "memory" => {
                Parameters::of(&url, &[])?;
                Arc::new(InMemory::new())
            }
            other => {
                let given = other.to_owned();
                return Err(StoreUrlError::Scheme { given, expected: "s3" });
            }
        };
        let prefix = Path::from_url_path(url.path())
            .map_err(|error| StoreUrlError::Part { part: "prefix", problem: error.to_string() })?;
        Self::over(backend, prefix)
    }

    fn over(backend: Arc<dyn Backend>, prefix: Path) -> Result<Self, StoreUrlError> {
        let runtime = Runtime::start()
            .map_err(|error| StoreUrlError::Part { part: "runtime", problem: error.to_string() })?;
        Ok(Self { backend, prefix, runtime })
    }

    fn path(&self, chunk: &ChunkAddress) -> Path {
        chunk_path(chunk).split('/').fold(self.prefix.clone(), Path::join)
    }

    /// Reads a chunk, or the bytes of a range that it has.
    fn get_part(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        range: Option<Range<u64>>,
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let path = self.path(chunk);
        let operation = format!("GET {path}");
        let corrupt =
            |what: &str| StoreError::new(StoreErrorKind::Corrupt, format!("{operation}: {what}"));
        self.run(&operation, deadline, async {
            let options =
                GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
            let object = match self.backend.get_opts(&path, options).await {
                Ok(object) => object,
                Err(ObjectError::NotFound { .. }) => return Ok(None),
                Err(error) => return Err(into_error(error, operation.clone())),
            };
            let room = into.len();
            let size = object.range.end.saturating_sub(object.range.start);
            let part = usize::try_from(size).ok().and_then(|size| into.get_mut(..size));
            let Some(part) = part else {
                return Err(corrupt(&format!("{size} bytes, there is room for {room}")));
            };
            if part.is_empty() {
                return Err(corrupt("empty"));
            }
            let length = part.len();
            let mut rest = part;
            let mut pieces = object.into_stream();
            while let Some(piece) = pieces.next().await {
                let piece = piece.map_err(|error| into_error(error, operation.clone()))?;
                let Some((place, after)) = rest.split_at_mut_checked(piece.len()) else {
                    return Err(corrupt(&format!("longer than its {length} bytes")));
                };
                place.copy_from_slice(&piece);
                rest = after;
            }
            if !rest.is_empty() {
                return Err(corrupt(&format!("{} bytes are missing of {length}", rest.len())));
            }
            Ok(Some(length))
        })
    }

    /// Describes an object by its path.
    fn describe(&self, object: &ObjectMeta) -> Listed {
        let path = object.location.as_ref();
        let below = path.strip_prefix(self.prefix.as_ref());
        let below = below.map(|below| below.strip_prefix('/').unwrap_or(below));
        match below.and_then(parse_chunk_path) {
            Some(address) => Listed::Chunk(ListedChunk { address, bytes: object.size }),
            None => Listed::Other { path: path.to_owned() },
        }
    }

    /// Runs a request until its deadline.
    fn run<T>(
        &self,
        operation: &str,
        deadline: Instant,
        request: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        time_left(deadline, operation)?;
        let done = self.runtime.run(deadline, request);
        done.unwrap_or_else(|| Err(StoreError::new(StoreErrorKind::Timeout, operation)))
    }
}

impl ListChunks for ObjectStore {
    fn list(
        &self,
        limit: Duration,
        visit: &mut dyn FnMut(Listed) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let below = self.prefix.clone().join("v1");
        // The last page is found by a call after the end, which not every listing allows.
        let mut objects = self.backend.list(Some(&below)).fuse();
        loop {
            let page = self.run("LIST", deadline(limit), async {
                let mut page = Vec::new();
                while let Some(object) = objects.next().await {
                    page.push(object.map_err(|error| into_error(error, "LIST".to_owned()))?);
                    if page.len() == PAGE {
                        break;
                    }
                }
                Ok(page)
            })?;
            if page.is_empty() {
                return Ok(());
            }
            for object in page {
                if visit(self.describe(&object)).is_break() {
                    return Ok(());
                }
            }
        }
    }

    fn get_front(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let end = u64::try_from(into.len()).unwrap_or(u64::MAX);
        self.get_part(chunk, into, Some(0..end), deadline)
    }
}

impl BlockStore for ObjectStore {
    fn tier(&self) -> Tier {
        Tier::Store
    }

    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        let heads = chunks.iter().map(|chunk| async move {
            let path = self.path(chunk);
            match self.backend.head(&path).await {
                Ok(_) => Ok(true),
                Err(ObjectError::NotFound { .. }) => Ok(false),
                Err(error) => Err(into_error(error, format!("HEAD {path}"))),
            }
        });
        // Boxed: the type of a closure's future is not general enough for a stream's bounds.
        let heads: Vec<_> = heads.map(Box::pin).collect();
        self.run("HEAD", deadline, stream::iter(heads).buffered(AT_ONCE).try_collect())
    }

    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        self.get_part(chunk, into, None, deadline)
    }

    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        let path = self.path(chunk);
        let operation = format!("PUT {path}");
        if bytes.is_empty() {
            return Err(StoreError::new(StoreErrorKind::Corrupt, format!("{operation}: empty")));
        }
        let mut payload = PutPayloadMut::new().with_block_size(COPIED_AT_ONCE);
        for piece in bytes.chunks(COPIED_AT_ONCE) {
            time_left(deadline, &operation)?;
            payload.extend_from_slice(piece);
        }
        let (backend, payload) = (Arc::clone(&self.backend), payload.freeze());
        // A signature and a checksum of the whole payload are computed in one poll.
        let written = self.runtime.run_apart(deadline, async move {
            backend.put_opts(&path, payload, PutOptions::from(PutMode::Create)).await
        });
        match written {
            Some(Ok(_)) => Ok(Put::New),
            Some(Err(ObjectError::AlreadyExists { .. })) => Ok(Put::WasThere),
            Some(Err(error)) => Err(into_error(error, operation)),
            None => Err(StoreError::new(StoreErrorKind::Timeout, &operation)),
        }
    }

    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        let paths: Vec<_> = chunks.iter().map(|chunk| Ok(self.path(chunk))).collect();
        self.run("DELETE", deadline, async {
            let mut removed = self.backend.delete_stream(stream::iter(paths).boxed());
            while let Some(result) = removed.next().await {
                match result {
                    Ok(_) | Err(ObjectError::NotFound { .. }) => {}
                    Err(error) => return Err(into_error(error, "DELETE".to_owned())),
                }
            }
            Ok(())
        })
    }

    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        remove_listed(self, scope, deadline)
    }
}

/// Writes no credentials.
impl fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStore")
            .field("backend", &self.backend.to_string())
            .field("prefix", &self.prefix.as_ref())
            .finish_non_exhaustive()
    }
}

/// Makes the client of a bucket.
fn s3(
    url: &Url,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<impl Backend, StoreUrlError> {
    let mut parameters = Parameters::of(url, &["endpoint", "region", "allow_http"])?;
    let bucket = url.host_str().filter(|bucket| !bucket.is_empty()).ok_or_else(|| {
        StoreUrlError::Part { part: "bucket", problem: "s3://bucket/prefix is expected".to_owned() }
    })?;
    if url.port().is_some() || !url.username().is_empty() || url.password().is_some() {
        let problem = "a server is given by `endpoint`, credentials by the environment".to_owned();
        return Err(StoreUrlError::Part { part: "bucket", problem });
    }
    let allow_http = parameters.parse("allow_http", "true or false", |text| text.parse().ok())?;
    let allow_http = allow_http.unwrap_or(false);
    let endpoint =
        parameters.parse("endpoint", "https://.., or http://.. with allow_http", |text| {
            let scheme = Url::parse(text).ok()?.scheme().to_owned();
            (scheme == "https" || (scheme == "http" && allow_http)).then(|| text.to_owned())
        })?;
    let mut builder = AmazonS3Builder::new();
    for (name, value) in variables {
        if !name.starts_with("AWS_") {
            continue;
        }
        if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = parameters.take("region") {
        builder = builder.with_region(region);
    }
    // Deadlines are this crate's; the connect limit ends attempts whose call is gone.
    let client = ClientOptions::new()
        .with_allow_http(allow_http)
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT_LIMIT)
        .with_http1_only();
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    builder
        .with_bucket_name(bucket)
        .with_client_options(client)
        .with_retry(retry)
        .with_checksum_algorithm(Checksum::CRC64NVME)
        .with_disable_bulk_delete(true)
        .with_http_connector(Connector)
        .build()
        .map_err(|error| StoreUrlError::Part { part: "setting", problem: error.to_string() })
}

/// Finds the kind of a failure and adds the operation.
fn into_error(error: ObjectError, operation: String) -> StoreError {
    let kind = match &error {
        ObjectError::PermissionDenied { .. } | ObjectError::Unauthenticated { .. } => {
            StoreErrorKind::Denied
        }
        // Of a write: the bucket.
        ObjectError::NotFound { .. } => StoreErrorKind::Denied,
        ObjectError::Generic { .. } => http::kind(&error),
        _ => StoreErrorKind::Other,
    };
    StoreError::new(kind, operation).with_source(error)
}

/// Objects of a listing that are held at a time.
const PAGE: usize = 1_000;
/// Requests at once of one call.
const AT_ONCE: usize = 32;
/// Bytes of a chunk that are copied between two looks at the deadline.
const COPIED_AT_ONCE: usize = 1 << 20;
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
