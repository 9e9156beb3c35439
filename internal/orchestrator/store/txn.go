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

// txn is one change being decided, or several: it reads a single revision of the store, what those before it in a group
// wrote and what it wrote itself, and collects writes, which happen only if nothing it has read changed since.
type txn struct {
	ctx          context.Context
	etcd         *clientv3.Client
	group        *txn  // those before it
	revision     int64 // all reads are of this one; 0 before the first; of the change when it was made
	writes       []clientv3.Op
	index        map[string]int // of writes, by key
	readings     map[string]reading
	compared     map[string]bool // keys that must not have changed at the commit
	listed       map[string]bool // directories into which nothing must have come then
	deletesRange bool            // readAll directories are among what it deletes: it has a transaction to itself
	indivisible  bool            // it fits into one transaction, and is not made in parts
	readsGroup   bool            // on what those before it wrote
	maxOps       int             // writes, and comparisons, that etcd takes
}

// reading is what a key has, and since which revision; both are zero when it is not there.
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

// next is a change that is decided after those that the group has.
func (g *txn) next(ctx context.Context) *txn {
	t := newTxn(ctx, g.etcd)
	t.group, t.revision, t.readings = g, g.revision, g.readings
	return t
}

// join adds a change to a group: what it writes, and what it was decided on.
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

// maxOps is what etcd takes in one transaction unless its operator allows more.
const maxOps = 128

// maxEmbeddedOps is what our own etcd takes. So many changes together are made with one write to the disk.
const maxEmbeddedOps = 1024

// maxBatchOf is what an etcd takes of changes that are made together.
func maxBatchOf(etcd *clientv3.Client) int {
	if len(etcd.Endpoints()) == 0 { // it is in this process
		return maxEmbeddedOps
	}
	return maxOps
}

// weight is what a change takes of a transaction.
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

// maxBytes is what goes into one transaction; etcd takes 1.5 MiB in a request.
const maxBytes = 1 << 20

// fits tells whether changes go into one transaction together.
func (w weight) fits(most int) bool {
	return w.writes < most && w.compares <= most && w.bytes <= maxBytes
}

// commit makes the first writes, as many as a transaction takes, and none if what they were decided on has changed.
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
		// More than can be named: then nothing at all may have come, changed or gone.
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

// errLater is that of a change for which those before it have to be made first: it reads many keys at a time, which it
// would see without what they wrote.
var errLater = errors.New("this has to be decided when what is before it has been made")

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

// groupWrites is what those before it wrote into a range. It leans on that.
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

// tryRead asks again when there was no answer, which makes the client turn to the next member: one that
// vanished or was stopped is not missed at once. A single member is given the whole time.
func (t *txn) tryRead(ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.ctx, requestTimeout)
	defer cancel()
	patience := requestTimeout
	if len(t.etcd.Endpoints()) > 1 {
		patience = readTimeout
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

// fetch reads those of many keys that were not read yet, in few requests, for get to find them.
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

// get returns "" for a key that is not there.
func (t *txn) get(key string) (string, error) {
	if i, ok := t.index[key]; ok {
		return string(t.writes[i].ValueBytes()), nil
	}
	if t.group != nil {
		if i, ok := t.group.index[key]; ok {
			t.readsGroup = true
			return string(t.group.writes[i].ValueBytes()), nil
		}
	}
	found, known := t.readings[key]
	if !known {
		resp, err := t.read(key)
		if err != nil {
			return "", err
		}
		found = readingOf(resp.Kvs)
		t.readings[key] = found
	}
	t.compared[key] = true
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
		t.listed[dir] = true
	}
	return resp, err
}

func (t *txn) put(key, value string) { t.write(key, clientv3.OpPut(key, value)) }

// write takes the place of an earlier write to the key: etcd refuses two in a transaction.
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
