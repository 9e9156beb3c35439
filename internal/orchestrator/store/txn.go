package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// txn is one change during its decision, or a group of changes. Its reads return one revision of the store, plus the
// earlier writes of the group and of this change. It collects writes. The commit fails if a key that was read has
// changed.
type txn struct {
	ctx          context.Context
	etcd         *clientv3.Client
	group        *txn  // earlier changes of the batch; nil for the group, and before the queue
	revision     int64 // of all reads, 0 before the first one; after the commit, the revision of the commit
	writes       []clientv3.Op
	index        map[string]int // positions in writes, by key
	readings     map[string]reading
	compared     map[string]bool // keys that must be unchanged at the commit
	listed       map[string]bool // directories that must have no new or changed keys at the commit
	deletesRange bool            // it deletes whole directories: the last change of its batch
	indivisible  bool            // it fits into one transaction and must not be split
	readsGroup   bool            // it read writes of the group
	maxOps       int             // limit of etcd, for writes and for comparisons
}

// reading is the value and mod revision of a key; both are zero if it does not exist.
type reading struct {
	value    string
	revision int64
}

func newTxn(ctx context.Context, etcd *clientv3.Client) *txn {
	return &txn{
		ctx:      ctx,
		etcd:     etcd,
		maxOps:   maxOps,
		index:    map[string]int{},
		readings: map[string]reading{},
		compared: map[string]bool{},
		listed:   map[string]bool{},
	}
}

// next returns a txn for a change that is decided after those in the group.
func (g *txn) next(ctx context.Context) *txn {
	t := newTxn(ctx, g.etcd)
	t.group, t.revision, t.readings = g, g.revision, g.readings
	return t
}

// join adds the writes and comparisons of a change to a group.
func (g *txn) join(t *txn) {
	maps.Copy(g.compared, t.compared)
	maps.Copy(g.listed, t.listed)
	g.indivisible = g.indivisible || t.indivisible
	for _, op := range t.writes {
		if op.RangeBytes() != nil {
			g.writes = append(g.writes, op)
		} else {
			g.write(string(op.KeyBytes()), op)
		}
	}
}

// maxOps is etcd's default limit per transaction.
const maxOps = 128

// maxEmbeddedOps is the limit of the embedded etcd. It is higher, so that more changes share one write to disk.
const maxEmbeddedOps = 1024

// maxBatchOf returns the limit of an etcd.
func maxBatchOf(etcd *clientv3.Client) int {
	if len(etcd.Endpoints()) == 0 { // embedded
		return maxEmbeddedOps
	}
	return maxOps
}

// weight is the size of a change.
type weight struct{ writes, compares, bytes int }

func (t *txn) weight() weight {
	w := weight{len(t.writes), len(t.compared) + len(t.listed), 0}
	for _, op := range t.writes {
		w.bytes += len(op.KeyBytes()) + len(op.ValueBytes())
	}
	return w
}

func (w weight) and(v weight) weight {
	return weight{w.writes + v.writes, w.compares + v.compares, w.bytes + v.bytes}
}

// maxBytes limits a transaction; etcd accepts 1.5 MiB in a request.
const maxBytes = 1 << 20

// fits reports whether changes fit into one transaction.
func (w weight) fits(most int) bool {
	return w.writes < most && w.compares <= most && w.bytes <= maxBytes
}

// commit commits as many of the first writes as fit into one transaction, and returns their number. It returns 0 if a
// key that the change read has changed.
func (t *txn) commit(ctx context.Context) (made int, err error) {
	writes := t.writes[:min(len(t.writes), t.maxOps)]
	ops := writes
	if slices.ContainsFunc(writes, clientv3.Op.IsDelete) {
		writes = writes[:min(len(writes), t.maxOps-1)]
		ops = append([]clientv3.Op{clientv3.OpPut(keyDeletions, "")}, writes...)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := t.etcd.Txn(ctx).If(t.compares()...).Then(ops...).Commit()
	if err != nil || !resp.Succeeded {
		return 0, err
	}
	t.revision = resp.Header.Revision
	return len(writes), nil
}

func (t *txn) compares() (all []clientv3.Cmp) {
	unchanged := func(dir string) clientv3.Cmp {
		return clientv3.Compare(clientv3.ModRevision(dir), "<", t.revision+1).WithPrefix()
	}
	if t.weight().compares > t.maxOps {
		// Too many keys to compare: no key of the store may have changed.
		return []clientv3.Cmp{unchanged(root)}
	}
	for key := range t.compared {
		all = append(all, clientv3.Compare(clientv3.ModRevision(key), "=", t.readings[key].revision))
	}
	for dir := range t.listed {
		all = append(all, unchanged(dir))
	}
	return all
}

// errLater is returned by a change that reads a range into which earlier changes of the batch wrote. The change must
// wait for their commit.
var errLater = errors.New("this change must wait for the commit of those before it")

func (t *txn) read(key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if op := clientv3.OpGet(key, opts...); t.groupWrites(op.KeyBytes(), op.RangeBytes()) != nil {
		return nil, errLater
	}
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

// groupWrites returns the keys in a range that earlier changes of the batch wrote.
func (t *txn) groupWrites(from, end []byte) (keys []string) {
	if t.group == nil {
		return nil
	}
	for _, op := range t.group.writes {
		if key := op.KeyBytes(); bytes.Compare(key, from) >= 0 && bytes.Compare(key, end) < 0 {
			keys = append(keys, string(key))
		}
	}
	t.readsGroup = t.readsGroup || keys != nil
	return keys
}

// tryRead retries a read that times out. The client then uses the next etcd member, so a failed member delays a read
// only briefly. With a single member, one attempt has the whole timeout.
func (t *txn) tryRead(attempt func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.ctx, requestTimeout)
	defer cancel()
	timeout := requestTimeout
	if len(t.etcd.Endpoints()) > 1 {
		timeout = readTimeout
	}
	for ; ; timeout *= 2 {
		once, cancel := context.WithTimeout(ctx, timeout)
		err := attempt(once)
		timedOut := once.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil || !timedOut {
			return err
		}
	}
}

// fetch reads the keys that are not in readings yet, in few requests. A later get returns them without a request.
func (t *txn) fetch(keys ...string) error {
	keys = slices.DeleteFunc(slices.Clone(keys), func(key string) bool { _, known := t.readings[key]; return known })
	slices.Sort(keys)
	keys = slices.Compact(keys)
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
		if t.revision == 0 {
			t.revision = resp.Txn().Header.Revision
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

// get returns the value of a key, "" if it does not exist. The commit fails if the key has changed since.
func (t *txn) get(key string) (string, error) {
	value, stored, err := t.peek(key)
	if err == nil && stored {
		t.compared[key] = true
	}
	return value, err
}

// peek is get of a key that may have changed at the commit. It returns whether the value is the store's, and not one
// that this change or an earlier one of its batch writes.
func (t *txn) peek(key string) (value string, stored bool, err error) {
	if i, ok := t.index[key]; ok {
		return string(t.writes[i].ValueBytes()), false, nil
	}
	if t.group != nil {
		if i, ok := t.group.index[key]; ok {
			t.readsGroup = true
			return string(t.group.writes[i].ValueBytes()), false, nil
		}
	}
	found, known := t.readings[key]
	if !known {
		resp, err := t.read(key)
		if err != nil {
			return "", false, err
		}
		found = readingOf(resp.Kvs)
		t.readings[key] = found
	}
	return found.value, true, nil
}

// load decodes the value of a key into m. It returns false if the key does not exist.
func (t *txn) load(key string, m proto.Message) (bool, error) {
	value, err := t.get(key)
	if err != nil || value == "" {
		return false, err
	}
	return true, decode(key, []byte(value), m)
}

// names lists the keys below a directory, without the name of the directory.
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

// list reads the keys below a directory. The commit fails if keys were added or changed since.
func (t *txn) list(dir string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	resp, err := t.read(dir, append(opts, clientv3.WithPrefix())...)
	if err == nil {
		t.listed[dir] = true
	}
	return resp, err
}

func (t *txn) put(key, value string) { t.write(key, clientv3.OpPut(key, value)) }

// write adds a write. It replaces an earlier write to the key, because etcd refuses two in one transaction.
func (t *txn) write(key string, op clientv3.Op) {
	if i, ok := t.index[key]; ok {
		t.writes[i] = op
		return
	}
	t.index[key] = len(t.writes)
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
	t.deletesRange = true
}

func decode(key string, value []byte, m proto.Message) error {
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(value, m); err != nil {
		return fmt.Errorf("the store's %s is not readable: %w", key, err)
	}
	return nil
}
