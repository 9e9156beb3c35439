package store

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"pilaster.io/pilaster/internal/statefile"
)

// BackupHeader is the first line of a backup, as JSON. One record per line follows. The last line is the SHA-256 of the
// lines before it. A backup contains the key of each tenant and of the certificate authority.
type BackupHeader struct {
	Format     string       `json:"format"`  // backupFormat
	Version    int          `json:"version"` // of the format
	Cluster    string       `json:"cluster"` // UUID
	BasePrefix netip.Prefix `json:"basePrefix"`
	Made       time.Time    `json:"made"`
	Revision   int64        `json:"revision"` // of the store
	Records    int          `json:"records"`
}

const (
	backupFormat  = "pilaster orchestrator backup"
	backupVersion = 1
	sumPrefix     = "sha256 "
	pageSize      = 100_000 // records per read; for each page etcd also scans the keys after it
)

// backupRecord is one key of the store.
type backupRecord struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// Backup writes the content of the embedded etcd of a data directory, at one revision, to a new file. An orchestrator
// may run on the directory.
func Backup(ctx context.Context, dataDir, file string, log *slog.Logger) (BackupHeader, error) {
	if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		return BackupHeader{}, fmt.Errorf("%s exists already and was not changed: choose a new file", file)
	}
	client, end, err := openDataDir(ctx, dataDir, log)
	if err != nil {
		return BackupHeader{}, err
	}
	defer end()
	text, header, err := dump(ctx, client)
	if err != nil {
		return BackupHeader{}, err
	}
	return header, statefile.WriteBytes(file, text, 0o600)
}

// openDataDir returns a client of the etcd of a data directory. If no orchestrator runs there, it starts the etcd.
func openDataDir(ctx context.Context, dataDir string, log *slog.Logger) (*clientv3.Client, func(), error) {
	if _, err := os.Stat(filepath.Join(dataDir, "etcd")); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(filepath.Join(dataDir, "join-token")); err == nil {
			return nil, nil, fmt.Errorf(
				"the orchestrator of %s has no store there: it uses an external etcd cluster\n  back that up with "+
					"`etcdctl snapshot save`",
				dataDir,
			)
		}
		return nil, nil, fmt.Errorf("%s holds no orchestrator's store; give the orchestrator's --data-dir", dataDir)
	} else if err != nil {
		return nil, nil, err
	}
	lock, err := statefile.Lock(dataDir)
	if err == nil {
		lock.Close() // no orchestrator runs; Embed takes the lock
		e, err := Embed(ctx, dataDir, log)
		if err != nil {
			return nil, nil, err
		}
		return e.Client, e.Close, nil
	}
	client, err := newClient([]string{"unix://" + socketIn(dataDir)}, nil)
	if err != nil {
		return nil, nil, err
	}
	return client, func() { client.Close() }, nil
}

// dump reads all records at one revision.
func dump(ctx context.Context, client *clientv3.Client) ([]byte, BackupHeader, error) {
	header := BackupHeader{Format: backupFormat, Version: backupVersion, Made: time.Now().UTC().Truncate(time.Second)}
	var lines bytes.Buffer
	revision, err := each(ctx, client, func(kv *mvccpb.KeyValue) error {
		header.Records++
		if !utf8.Valid(kv.Value) {
			return fmt.Errorf("the store's %s is not readable", kv.Key)
		}
		line, err := json.Marshal(backupRecord{string(kv.Key), string(kv.Value)})
		if err != nil {
			return err
		}
		lines.Write(append(line, '\n'))
		if string(kv.Key) == keyCluster {
			var r clusterRecord
			if err := json.Unmarshal(kv.Value, &r); err != nil {
				return fmt.Errorf("the store's cluster record is not readable: %w", err)
			}
			header.Cluster, header.BasePrefix = r.UUID, r.BasePrefix
		}
		return nil
	})
	if err != nil {
		return nil, header, fmt.Errorf("no backup was made: %w", err)
	}
	header.Revision = revision
	if header.Cluster == "" {
		return nil, header, errors.New("the store holds no cluster yet; no backup was made")
	}
	first, err := json.Marshal(header)
	if err != nil {
		return nil, header, err
	}
	text := append(append(first, '\n'), lines.Bytes()...)
	return fmt.Appendf(text, "%s%x\n", sumPrefix, sha256.Sum256(text)), header, nil
}

// each calls visit for all records at one revision. It reads them in pages, because there may be very many.
func each(
	ctx context.Context,
	client *clientv3.Client,
	visit func(*mvccpb.KeyValue) error,
) (revision int64, err error) {
	next, end := root, clientv3.GetPrefixRangeEnd(root)
	for more := true; more; {
		once, cancel := context.WithTimeout(ctx, requestTimeout)
		resp, err := client.Get(
			once,
			next,
			clientv3.WithRange(end),
			clientv3.WithLimit(pageSize),
			clientv3.WithRev(revision),
		)
		cancel()
		if err != nil {
			return 0, fmt.Errorf("the store did not answer: %w", err)
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			next = string(kv.Key) + "\x00"
			if err := visit(kv); err != nil {
				return 0, err
			}
		}
		more = resp.More
	}
	return revision, nil
}

// ReadBackup reads a backup and checks the whole file.
func ReadBackup(file string) (BackupHeader, map[string]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return BackupHeader{}, nil, err
	}
	header, records, err := parseBackup(text)
	if err != nil {
		err = fmt.Errorf("%s cannot be restored: %w\n  nothing was changed", file, err)
	}
	return header, records, err
}

func parseBackup(text []byte) (header BackupHeader, records map[string]string, err error) {
	first, _, _ := bytes.Cut(text, []byte("\n"))
	if json.Unmarshal(first, &header) != nil || header.Format != backupFormat {
		return header, nil, errors.New("it is not a backup of `pilaster orchestrator backup`")
	}
	if header.Version != backupVersion {
		return header, nil, fmt.Errorf(
			"it has version %d of the format, and this program supports version %d: use the pilaster that made it",
			header.Version,
			backupVersion,
		)
	}
	at := bytes.LastIndex(bytes.TrimSuffix(text, []byte("\n")), []byte("\n")) + 1
	body, sum := text[:at], string(text[at:])
	if !strings.HasPrefix(sum, sumPrefix) {
		return header, nil, errors.New("its end is missing")
	}
	if sum != fmt.Sprintf("%s%x\n", sumPrefix, sha256.Sum256(body)) {
		return header, nil, errors.New("it was changed or damaged since it was made: its checksum is wrong")
	}
	records = map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(body[len(first)+1:]))
	lines.Buffer(nil, len(body))
	for lines.Scan() {
		var r backupRecord
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return header, nil, err
		}
		if !strings.HasPrefix(r.Key, root) {
			return header, nil, fmt.Errorf("it has a record %q, which is not an orchestrator's", r.Key)
		}
		records[r.Key] = r.Value
	}
	if len(records) != header.Records || lines.Err() != nil {
		return header, nil, fmt.Errorf("it has %d records of %d", len(records), header.Records)
	}
	return header, records, lines.Err()
}
