package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

const root = "/pilaster/1/"

const (
	keyCluster      = root + "cluster"
	dirNodes        = root + "nodes/"
	dirUUIDs        = root + "uuids/"
	dirDeleted      = root + "deleted/"
	dirRecalled     = root + "recalled/"
	dirPrefixes     = root + "prefixes/"
	dirTenants      = root + "tenants/"
	dirTenantIDs    = root + "tenant-ids/"
	dirApps         = root + "apps/"
	dirAppIDs       = root + "app-ids/"
	dirHosting      = root + "hosting/"
	dirSessions     = root + "sessions/"
	dirMappings     = root + "mappings/"
	dirGiven        = root + "given/"
	dirResting      = root + "resting/"
	keyEdge         = root + "edge"
	dirRegions      = root + "regions/"
	dirPublished    = root + "published/"
	dirWithdrawn    = root + "withdrawn/"
	keyDeletions    = root + "deletions"
	keyPrefixMark   = root + "marks/prefix"
	keyTenantMark   = root + "marks/tenant"
	dirAppMarks     = root + "marks/app/"
	dirOverlayMarks = root + "marks/overlay/"

	dirPublishedMarks = root + "marks/published/"
	requestTimeout    = 5 * time.Second        // of one etcd request
	readTimeout       = 500 * time.Millisecond // of the first try of a read; each further one has twice as long
)

// Store hands out prefixes, ids, keys and apps. Its methods may be called by many.
type Store struct {
	etcd *clientv3.Client
	log  *slog.Logger
	// turn is held while a change is made: changes of one process wait for each other here
	// instead of undoing each other's transactions.
	turn      chan struct{}
	cluster   Cluster
	lease     atomic.Int64 // that sessions live under
	resting   atomic.Pointer[restLease]
	conflicts atomic.Uint64
	committed atomic.Int64  // etcd's revision of the last change; written in turn
	watched   atomic.Int64  // etcd's revision up to which Watch has told
	rewound   chan struct{} // a reading was of an earlier one
}

// Cluster is what Open found or made.
func (s *Store) Cluster() Cluster { return s.cluster }

// Conflicts is how many transactions were decided anew because another orchestrator was first.
func (s *Store) Conflicts() uint64 { return s.conflicts.Load() }

// Revision is that of the last change this process made: a follower that has it has them all.
func (s *Store) Revision() int64 { return s.cluster.From + s.committed.Load() }

// Ping reports whether a majority of the store answers.
func (s *Store) Ping(ctx context.Context) error {
	return s.change(ctx, func(t *txn) error {
		_, err := t.get(keyCluster)
		return err
	})
}

// txn is one change being decided: it reads a single revision of the store and what it wrote itself,
// and collects writes, which happen only if nothing it has read changed since.
type txn struct {
	ctx      context.Context
	etcd     *clientv3.Client
	revision int64 // all reads are of this one; 0 before the first; of the change when it was made
	compares []clientv3.Cmp
	writes   []clientv3.Op
	at       map[string]int // of writes, by key
	readings map[string]reading
}

// reading is what a key has, and since which revision; both are zero when it is not there.
type reading struct {
	value    string
	revision int64
	compared bool // at the commit
}

func newTxn(ctx context.Context, etcd *clientv3.Client) *txn {
	return &txn{ctx: ctx, etcd: etcd, at: map[string]int{}, readings: map[string]reading{}}
}

// maxOps is what etcd takes in one transaction unless its operator allows more.
const maxOps = 128

// change runs decide, perhaps several times, and commits what it wrote; when it fails, nothing is
// written. What decide finds may be kept even when it writes nothing: all its reads are of one
// revision. What is too large for a transaction is made in several, in the order it was written and
// each decided anew: the first was decided on the whole, and the later ones leave out what is there. So
// the order must be one that may end anywhere, to be gone on with when the change is asked for again.
func (s *Store) change(ctx context.Context, decide func(*txn) error) error {
	t, watched := newTxn(ctx, s.etcd), s.watched.Load()
	err := decide(t)
	if t.revision != 0 && t.revision < watched { // reads are linearised: it cannot be a member that lags
		select {
		case s.rewound <- struct{}{}:
		default:
		}
	}
	if !errors.Is(err, rpctypes.ErrCompacted) && (err != nil || len(t.writes) == 0) {
		return err // most calls find everything as it should be, and need not wait for a turn
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	for {
		t := newTxn(ctx, s.etcd)
		err := decide(t)
		if errors.Is(err, rpctypes.ErrCompacted) {
			continue // slept so long that the revision it reads is gone
		}
		if err != nil || len(t.writes) == 0 {
			return err
		}
		made, err := t.commit()
		switch {
		case err != nil:
			s.resting.Store(nil) // perhaps etcd knows it no more
			return unavailable(err)
		case made == 0:
			s.conflicts.Add(1)
			continue
		}
		s.committed.Store(t.revision)
		if made == len(t.writes) {
			return nil
		}
	}
}

// commit makes the first writes, as many as a transaction takes, and none if what they were decided on has changed.
func (t *txn) commit() (made int, err error) {
	writes := t.writes[:min(len(t.writes), maxOps)]
	ops := writes
	if slices.ContainsFunc(writes, clientv3.Op.IsDelete) {
		writes = writes[:min(len(writes), maxOps-1)]
		ops = append([]clientv3.Op{clientv3.OpPut(keyDeletions, "")}, writes...)
	}
	compares := t.compares
	if len(compares) > maxOps {
		// More than can be named: then nothing at all may have come, changed or gone.
		compares = []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(root), "<", t.revision+1).WithPrefix()}
	}
	ctx, cancel := context.WithTimeout(t.ctx, requestTimeout)
	defer cancel()
	resp, err := t.etcd.Txn(ctx).If(compares...).Then(ops...).Commit()
	if err != nil || !resp.Succeeded {
		return 0, err
	}
	t.revision = resp.Header.Revision
	return len(writes), nil
}

func (t *txn) read(key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if t.revision != 0 {
		opts = append(opts, clientv3.WithRev(t.revision))
	}
	var resp *clientv3.GetResponse
	err := t.tryRead(func(ctx context.Context) (err error) {
		resp, err = t.etcd.Get(ctx, key, opts...)
		return err
	})
	if err != nil {
		return nil, unavailable(err)
	}
	if t.revision == 0 {
		t.revision = resp.Header.Revision
	}
	return resp, nil
}

// tryRead asks again when there was no answer, which makes the client turn to the next member: one that
// vanished or was stopped is not missed at once. A single member is given the whole time.
func (t *txn) tryRead(ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.ctx, requestTimeout)
	defer cancel()
	patience := readTimeout
	if len(t.etcd.Endpoints()) == 1 {
		patience = requestTimeout
	}
	for ; ; patience *= 2 {
		once, cancel := context.WithTimeout(ctx, patience)
		err := ask(once)
		late := once.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil || !late {
			return err
		}
	}
}

// fetch reads many keys at the revision of the first read, in few requests, for get to find them.
func (t *txn) fetch(keys []string) error {
	for some := range slices.Chunk(keys, maxOps) {
		var gets []clientv3.Op
		for _, key := range some {
			gets = append(gets, clientv3.OpGet(key, clientv3.WithRev(t.revision)))
		}
		var resp clientv3.OpResponse
		err := t.tryRead(func(ctx context.Context) (err error) {
			resp, err = t.etcd.Do(ctx, clientv3.OpTxn(nil, gets, nil))
			return err
		})
		if err != nil {
			return unavailable(err)
		}
		for i, key := range some {
			t.readings[key] = readingOf(resp.Txn().Responses[i].GetResponseRange().Kvs)
		}
	}
	return nil
}

func readingOf(kvs []*mvccpb.KeyValue) reading {
	if len(kvs) == 0 {
		return reading{}
	}
	return reading{value: string(kvs[0].Value), revision: kvs[0].ModRevision}
}

// get returns "" for a key that is not there.
func (t *txn) get(key string) (string, error) {
	if i, ok := t.at[key]; ok {
		return string(t.writes[i].ValueBytes()), nil
	}
	found, known := t.readings[key]
	if !known {
		resp, err := t.read(key)
		if err != nil {
			return "", err
		}
		found = readingOf(resp.Kvs)
	}
	if !found.compared {
		t.compares = append(t.compares, clientv3.Compare(clientv3.ModRevision(key), "=", found.revision))
		found.compared = true
		t.readings[key] = found
	}
	return found.value, nil
}

// load reports whether the key is there.
func (t *txn) load(key string, m proto.Message) (bool, error) {
	value, err := t.get(key)
	if err != nil || value == "" {
		return false, err
	}
	return true, decode(key, []byte(value), m)
}

// names lists what is below a directory, without the directory.
func (t *txn) names(dir string) ([]string, error) {
	resp, err := t.list(dir, clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	names := make([]string, len(resp.Kvs))
	for i, kv := range resp.Kvs {
		names[i] = strings.TrimPrefix(string(kv.Key), dir)
	}
	return names, nil
}

// list reads what is below a directory. The commit fails if more has come since.
func (t *txn) list(dir string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	resp, err := t.read(dir, append(opts, clientv3.WithPrefix())...)
	if err == nil {
		t.compares = append(t.compares, clientv3.Compare(clientv3.ModRevision(dir), "<", t.revision+1).WithPrefix())
	}
	return resp, err
}

func (t *txn) put(key, value string) { t.write(key, clientv3.OpPut(key, value)) }

// write takes the place of an earlier write to the key: etcd refuses two in a transaction.
func (t *txn) write(key string, op clientv3.Op) {
	if i, ok := t.at[key]; ok {
		t.writes[i] = op
		return
	}
	t.at[key] = len(t.writes)
	t.writes = append(t.writes, op)
}

func (t *txn) save(key string, m proto.Message) error {
	value, err := protojson.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", key, err)
	}
	t.put(key, string(value))
	return nil
}

func (t *txn) delete(key string) { t.write(key, clientv3.OpDelete(key)) }

func (t *txn) deleteAll(dir string) {
	t.writes = append(t.writes, clientv3.OpDelete(dir, clientv3.WithPrefix()))
}

func decode(key string, value []byte, m proto.Message) error {
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(value, m); err != nil {
		return fmt.Errorf("the store's %s is not readable: %w", key, err)
	}
	return nil
}

// Reason says what kind of refusal an Error is.
type Reason int

const (
	Invalid     Reason = iota + 1 // the request makes no sense
	NotFound                      // what it names does not exist
	Exists                        // what it makes exists already
	Refused                       // the state of the cluster forbids it
	Full                          // nothing is left to hand out
	Stale                         // what it goes on from is gone; it may begin anew
	Unavailable                   // the store does not answer; the text says whether the change may have happened
)

// Error is a refusal in a sentence for people.
type Error struct {
	Reason Reason
	Text   string
	cause  error
}

func (e *Error) Error() string { return e.Text }
func (e *Error) Unwrap() error { return e.cause }

func refuse(r Reason, format string, args ...any) error {
	return &Error{Reason: r, Text: fmt.Sprintf(format, args...)}
}

func unavailable(err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(err, rpctypes.ErrNoSpace) {
		return &Error{Full, "the store has reached its size and takes no change; nothing was changed: restart the orchestrator, which makes room in its embedded etcd" +
			" (in an etcd cluster of your own, compact and defragment it and disarm the alarm with etcdctl)", err}
	}
	if errors.Is(err, rpctypes.ErrLeaseNotFound) { // until the next one is granted
		return &Error{Unavailable, "the store has just forgotten which nodes are connected here; nothing was changed: try again", err}
	}
	return &Error{Unavailable, fmt.Sprintf("the store did not answer, so it is not known whether anything changed; try again: %v", err), err}
}
