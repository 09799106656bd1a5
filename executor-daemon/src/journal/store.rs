//! The file: one SQLite database in WAL mode. What `docs/adr/0005-journal.md` decides is carried out here.
//!
//! A record is in the kernel's hands when a call returns, and nothing is synced then. A thread of its own copies the log into
//! the database, which syncs both; so a power loss takes the latest records at most, and neither loses nor garbles others.
//!
//! ```text
//!   no file ─► made ─┐
//!   file of ours ────┼─► in use
//!   damaged ─► set aside ─► made
//!   file of a later version, or not ours ─► refused
//! ```

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, ErrorCode, OpenFlags, Params, Row, config::DbConfig, types::FromSql};
use serde::{Serialize, de::DeserializeOwned};

/// Counts the formats of the tables and of the values in them.
pub(super) const VERSION: i32 = 1;

/// Marks the database as ours: `exej`.
const APPLICATION_ID: i32 = 0x6578_656a;

const FILE: &str = "journal.sqlite";

/// What SQLite keeps beside a database.
const BESIDE: [&str; 3] = ["", "-wal", "-shm"];

/// Journals that were set aside and are kept for people.
const SET_ASIDE_KEPT: usize = 3;

/// Pages of the database that a connection keeps in memory, in KiB (negative says so to SQLite).
const CACHE_KIB: i64 = -512;

/// How long a write waits for another process that writes: the server that this one takes over from.
const BUSY: Duration = Duration::from_secs(5);

/// Statements that stay prepared.
const STATEMENTS: usize = 32;

/// Records between two copies of the log into the database.
pub(super) const CHECKPOINT_EVERY: u32 = 512;

/// The log's length that is waited for to shrink, in bytes: above it, records wait until it was copied.
pub(super) const MAX_LOG_BYTES: u64 = 16 * 1024 * 1024;

/// The longest log that is not copied when the journal is opened, in bytes: a few milliseconds' work.
pub(super) const MAX_LEFT_LOG_BYTES: u64 = 1024 * 1024;

const SCHEMA: &str = "
    create table meta(name text primary key, value integer not null) strict, without rowid;
    create table worlds(world integer primary key, keeper blob not null, boot text not null, pids integer not null) strict;
    create table starts(
        number integer primary key, world integer not null, start blob not null, started blob,
        asked integer not null default 0, ended blob, told integer not null default 0, read blob
    ) strict;
    create table keys(number integer primary key, key blob not null) strict;
    create table ledgers(account blob primary key, latest integer not null) strict, without rowid;
    create table completions(
        account blob not null, sequence integer not null, completion blob not null, primary key(account, sequence)
    ) strict, without rowid;
";

/// The open database.
#[derive(Debug)]
pub(super) struct Store {
    connection: Connection,
    path: PathBuf,
}

/// A store, and where a damaged one before it was put.
pub(super) type Opened = (Store, Option<PathBuf>);

impl Store {
    /// Opens the journal of a state directory; makes it if there is none. One that is damaged is set aside.
    ///
    /// # Errors
    /// When it cannot be opened, is another program's, or of a later version.
    pub(super) fn open(directory: &Path, now_ms: u64) -> io::Result<Opened> {
        let path = directory.join(FILE);
        match Self::open_or_make(&path) {
            Ok(store) => Ok((store, None)),
            Err(Unusable::Refused(error)) => Err(error),
            Err(Unusable::Damaged(problem)) => {
                let aside = set_aside(&path, now_ms)?;
                tracing::error!(
                    %problem, kept_as = %aside.display(),
                    "the journal is damaged and was set aside: what it knew of tasks, keys and completions is lost"
                );
                match Self::open_or_make(&path) {
                    Ok(store) => Ok((store, Some(aside))),
                    Err(Unusable::Refused(error)) => Err(error),
                    Err(Unusable::Damaged(problem)) => Err(io::Error::other(problem)),
                }
            }
        }
    }

    fn open_or_make(path: &Path) -> Result<Self, Unusable> {
        // Made here, so that it and what SQLite puts beside it are nobody else's to read.
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(_empty) => {
                let store = Self::connect(path)?;
                store.make()?;
                return Ok(store);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error.into()),
        }
        if fs::metadata(path)?.len() == 0 {
            return Err(Unusable::Damaged("it is empty".to_owned()));
        }
        let store = Self::connect(path)?;
        store.check_marks()?;
        let check: String = store.one("pragma quick_check(1)", ())?;
        if check == "ok" { Ok(store) } else { Err(Unusable::Damaged(check)) }
    }

    /// Whether [`Store::open`] could use what is there. Another process may be using it; nothing of it is changed.
    ///
    /// # Errors
    /// As [`Store::open`]. One that is damaged is none: it would be set aside.
    pub(super) fn probe(directory: &Path) -> io::Result<()> {
        for beside in BESIDE {
            let name = format!("{FILE}{beside}");
            match OpenOptions::new().read(true).write(true).open(directory.join(&name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io::Error::new(error.kind(), format!("{name}: {error}")));
                }
                Ok(_) | Err(_) => {}
            }
        }
        let path = directory.join(FILE);
        if fs::metadata(&path).map_or(0, |metadata| metadata.len()) == 0 {
            return Ok(());
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let probe = || {
            let connection = Connection::open_with_flags(&path, flags)?;
            connection.busy_timeout(BUSY)?;
            Self { connection, path: path.clone() }.check_marks()
        };
        match probe() {
            Ok(()) | Err(Unusable::Damaged(_)) => Ok(()),
            Err(Unusable::Refused(error)) => Err(error),
        }
    }

    /// Whether it is a journal of this program, of the version that it knows.
    fn check_marks(&self) -> Result<(), Unusable> {
        let (application, version): (i32, i32) =
            (self.one("pragma application_id", ())?, self.one("pragma user_version", ())?);
        if application != APPLICATION_ID {
            return Err(refused("it is not a journal of this program"));
        }
        if version != VERSION {
            return Err(refused(&format!("it is of version {version}, this program knows version {VERSION}")));
        }
        Ok(())
    }

    /// A connection to a database that exists.
    fn connect(path: &Path) -> Result<Self, rusqlite::Error> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY)?;
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        // In this order: the first reads the file, the last sets what it costs.
        connection.query_row("pragma journal_mode = wal", (), |_row| Ok(()))?;
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.pragma_update(None, "cache_size", CACHE_KIB)?;
        connection.query_row("pragma wal_autocheckpoint = 0", (), |_row| Ok(()))?;
        Ok(Self { connection, path: path.to_owned() })
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn in_memory() -> Result<Self, rusqlite::Error> {
        let connection = Connection::open_in_memory()?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        let store = Self { connection, path: PathBuf::new() };
        store.make()?;
        Ok(store)
    }

    /// Removes every row.
    #[cfg(any(test, fuzzing))]
    pub(super) fn empty(&self) -> Result<(), rusqlite::Error> {
        self.together(|store| {
            for table in ["meta", "worlds", "starts", "keys", "ledgers", "completions"] {
                store.execute(&format!("delete from {table}"), ())?;
            }
            Ok(())
        })
    }

    /// Another connection to the same database, for another thread.
    pub(super) fn another(&self) -> io::Result<Self> {
        Self::connect(&self.path).map_err(io_error)
    }

    fn make(&self) -> Result<(), rusqlite::Error> {
        let marks = format!("pragma application_id = {APPLICATION_ID}; pragma user_version = {VERSION};");
        self.connection.execute_batch(&format!("begin; {SCHEMA} {marks} commit;"))?;
        // From here on an empty database file is damage, however its log looks.
        self.checkpoint("truncate")
    }

    fn checkpoint(&self, mode: &str) -> Result<(), rusqlite::Error> {
        self.connection.query_row(&format!("pragma wal_checkpoint({mode})"), (), |_row| Ok(()))
    }

    /// Copies what is in the log into the database, without holding a writer up.
    pub(super) fn copy_log(&self) -> io::Result<()> {
        self.checkpoint("passive").map_err(io_error)
    }

    /// Copies what is in the log and begins it anew.
    pub(super) fn restart_log(&self) -> io::Result<()> {
        self.checkpoint("truncate").map_err(io_error)
    }

    /// Bytes of the log.
    pub(super) fn log_bytes(&self) -> u64 {
        let mut path = self.path.clone().into_os_string();
        path.push("-wal");
        fs::metadata(path).map_or(0, |metadata| metadata.len())
    }

    /// One statement. Alone it is one record: all of it or nothing.
    pub(super) fn execute(&self, sql: &str, parameters: impl Params) -> Result<usize, rusqlite::Error> {
        self.connection.prepare_cached(sql)?.execute(parameters)
    }

    /// Several statements as one record.
    pub(super) fn together<T>(
        &self,
        statements: impl FnOnce(&Self) -> Result<T, rusqlite::Error>,
    ) -> Result<T, rusqlite::Error> {
        let transaction = self.connection.unchecked_transaction()?;
        let done = statements(self)?;
        transaction.commit()?;
        Ok(done)
    }

    /// The first row, as `read` sees it.
    pub(super) fn row<T>(
        &self,
        sql: &str,
        parameters: impl Params,
        read: impl FnOnce(&Row<'_>) -> Result<T, rusqlite::Error>,
    ) -> Result<T, rusqlite::Error> {
        self.connection.prepare_cached(sql)?.query_row(parameters, read)
    }

    /// The first column of the first row.
    pub(super) fn one<T: FromSql>(&self, sql: &str, parameters: impl Params) -> Result<T, rusqlite::Error> {
        self.row(sql, parameters, |row| row.get(0))
    }

    /// All rows, as far as `read` makes something of them, and how many it did not.
    pub(super) fn all<T>(
        &self,
        sql: &str,
        read: impl Fn(&Row<'_>) -> Result<Option<T>, rusqlite::Error>,
    ) -> Result<(Vec<T>, usize), rusqlite::Error> {
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query(())?;
        let (mut all, mut unread) = (Vec::new(), 0);
        while let Some(row) = rows.next()? {
            match read(row)? {
                Some(value) => all.push(value),
                None => unread += 1,
            }
        }
        Ok((all, unread))
    }
}

/// Why a file cannot be used.
enum Unusable {
    /// It is not ours to replace, or cannot be reached.
    Refused(io::Error),
    /// Its content is broken.
    Damaged(String),
}

impl From<rusqlite::Error> for Unusable {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Damaged(error.to_string()),
            _ => Self::Refused(io_error(error)),
        }
    }
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        Self::Refused(error)
    }
}

fn refused(problem: &str) -> Unusable {
    Unusable::Refused(io::Error::new(io::ErrorKind::InvalidData, format!("{FILE}: {problem}")))
}

/// What SQLite said, for who speaks of files.
pub(super) fn io_error(error: rusqlite::Error) -> io::Error {
    let kind = match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => io::ErrorKind::StorageFull,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => io::ErrorKind::WouldBlock,
        Some(ErrorCode::PermissionDenied | ErrorCode::ReadOnly) => io::ErrorKind::PermissionDenied,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("{FILE}: {error}"))
}

/// Moves a database and what lies beside it out of the way; the oldest that were moved before go above their number.
fn set_aside(path: &Path, now_ms: u64) -> io::Result<PathBuf> {
    let named = |suffix: &str, beside: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        name.push(beside);
        PathBuf::from(name)
    };
    let suffix = format!(".damaged-{now_ms:016}");
    for beside in BESIDE {
        match fs::rename(named("", beside), named(&suffix, beside)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    let prefix = format!("{FILE}.damaged-");
    let directory = path.parent().unwrap_or(Path::new("."));
    let names = fs::read_dir(directory)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut kept: Vec<_> =
        names.filter(|name| name.starts_with(&prefix) && !name.contains("-wal") && !name.contains("-shm")).collect();
    kept.sort_unstable();
    kept.truncate(kept.len().saturating_sub(SET_ASIDE_KEPT));
    for name in kept {
        for beside in BESIDE {
            // What cannot be removed stays, and is tried again the next time.
            let _ = fs::remove_file(directory.join(format!("{name}{beside}")));
        }
    }
    Ok(named(&suffix, ""))
}

/// A value as it is stored.
pub(super) fn encode(value: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(value).expect("plain values can always be encoded")
}

/// A stored value; `None`: not one.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::from_bytes(bytes).ok()
}
