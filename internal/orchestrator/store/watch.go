package store

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Batch has the events of one revision, or the whole state at one revision.
type Batch struct {
	Revision int64 // etcd's plus Cluster.From
	Whole    bool  // Events are the whole state
	Cluster  bool  // the cluster record changed: there may be a new join token
	Events   []Event
}

// Event is one record that is new, changed or deleted. Exactly one field is set.
type Event struct {
	Node           *pilasterv1.Node
	DeletedNode    string
	Tenant         *pilasterv1.Tenant
	DeletedTenant  string // with its apps
	App            *pilasterv1.App
	EndedApp       *pilasterv1.App // with tenant and id only
	QuarantinedApp *pilasterv1.App // with tenant and id only
	FreedApp       *pilasterv1.App // the quarantine of its id has ended; with tenant and id only
	Hosting        *pilasterv1.Hosting
	EndedHosting   *pilasterv1.Hosting
	Session        *NodeSession
	Unreachable    *NodeUnreachable
	Mapping        *pilasterv1.Mapping
	EndedMapping   *pilasterv1.Mapping // with tenant and prefix only
	Region         *pilasterv1.Region
	DeletedRegion  string
	Policy         *pilasterv1.Policy
	EndedPolicy    *pilasterv1.Policy // with tenant, kind, namespace and name only
	Service        *pilasterv1.Service
	EndedService   *pilasterv1.Service // with tenant, namespace and name only
	Slice          *pilasterv1.EndpointSlice
	EndedSlice     *pilasterv1.EndpointSlice // with tenant, service and name only
	Load           *pilasterv1.NodeLoad
	EndedLoad      string          // name of a node
	OffloadAuto    *bool           // whether offloads start and end by the nodes' loads
	Protected      *[]netip.Prefix // prefixes that only egress rules for them or parts of them allow

	// Package cache derives these from Hosting.
	Override      *pilasterv1.Override
	EndedOverride *pilasterv1.Override
	ToFrontends   bool // of Tenant only the containers of offloads changed, which only frontends use
}

// NodeSession is the session of a node, or none.
type NodeSession struct {
	Node string
	Session
}

// NodeUnreachable says that a node does not answer, or that it does again.
type NodeUnreachable struct {
	Node        string
	Unreachable bool
}

// Watch calls apply with the whole state and then with each change, in order, from one goroutine, until ctx ends. It
// retries while etcd is unavailable. It starts again with the whole state if etcd has compacted changes that Watch
// missed, or if etcd was restored from a snapshot.
func (s *Store) Watch(ctx context.Context, apply func(Batch)) error {
	var revision int64 // of the last batch for which apply was called
	for {
		err := s.watch(ctx, &revision, apply)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, errRewound) {
			revision = 0
		}
		s.log.Warn("the watch of the store failed; retrying", "error", err, "revision", revision)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// errRewound reports that etcd no longer has the watched history. Without it, etcd would report no changes until it has
// reached the old revision again.
var errRewound = errors.New(
	"etcd has an earlier revision than before, so it was restored from a snapshot; reading the whole store again",
)

func (s *Store) watch(ctx context.Context, revision *int64, apply func(Batch)) error {
	if *revision == 0 {
		whole, err := s.readAll(ctx)
		if err != nil {
			return err
		}
		*revision = whole.Revision
		s.watched.Store(*revision)
		select {
		case <-s.rewound: // drop further signals
		default:
		}
		whole.countFrom(s.cluster.From)
		apply(whole)
	}
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	responses := s.etcd.Watch(ctx, root, clientv3.WithPrefix(), clientv3.WithRev(*revision+1))
	for {
		select {
		case resp, open := <-responses:
			if !open {
				return errors.New("the watch ended")
			}
			if err := resp.Err(); err != nil {
				return err
			}
			batches, err := splitByRevision(resp.Events)
			if err != nil {
				return err
			}
			for _, b := range batches {
				*revision = b.Revision
				b.countFrom(s.cluster.From)
				apply(b)
				s.watched.Store(*revision)
			}
		case <-s.rewound:
			return errRewound
		}
	}
}

// readAll reads all records and decodes them on all processors, because decoding is most of the time that an
// orchestrator with 100,000 nodes needs to start.
func (s *Store) readAll(ctx context.Context) (b Batch, err error) {
	b.Whole = true
	var all []*mvccpb.KeyValue
	b.Revision, err = each(ctx, s.etcd, func(kv *mvccpb.KeyValue) error {
		all = append(all, kv)
		return nil
	})
	if err != nil {
		return b, err
	}
	parts := make([]Batch, runtime.GOMAXPROCS(0))
	var g errgroup.Group
	for i := range parts {
		g.Go(func() error {
			for _, kv := range all[len(all)*i/len(parts) : len(all)*(i+1)/len(parts)] {
				if err := parts[i].decode(&clientv3.Event{Type: mvccpb.PUT, Kv: kv}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err = g.Wait()
	for _, part := range parts {
		b.Events, b.Cluster = append(b.Events, part.Events...), b.Cluster || part.Cluster
	}
	return b, err
}

// splitByRevision groups events by revision, that is, by transaction.
func splitByRevision(events []*clientv3.Event) ([]Batch, error) {
	var batches []Batch
	for _, e := range events {
		if n := len(batches); n == 0 || batches[n-1].Revision != e.Kv.ModRevision {
			batches = append(batches, Batch{Revision: e.Kv.ModRevision})
		}
		if err := batches[len(batches)-1].decode(e); err != nil {
			return nil, err
		}
	}
	return batches, nil
}

// countFrom adds the offset of revisions to etcd's revisions.
func (b *Batch) countFrom(from int64) {
	b.Revision += from
	for _, e := range b.Events {
		if e.Policy != nil {
			e.Policy.Revision += from
		}
	}
}

// decode appends an event of etcd if its key is of a kind that Watch reports.
func (b *Batch) decode(raw *clientv3.Event) error {
	key := string(raw.Kv.Key)
	b.Cluster = b.Cluster || key == keyCluster
	k, name := kindOf(key)
	if k.event == nil {
		return nil
	}
	e, err := k.event(name, raw.Kv, raw.Type == clientv3.EventTypeDelete)
	if e != (Event{}) {
		b.Events = append(b.Events, e)
	}
	return err
}

// kind is a kind of records in the store. To add one, add its directory to store.go, a row to kinds, and a field
// to Event.
type kind struct {
	dir string

	// leased records expire. A restore drops them: they are outdated, and without a lease they would never expire.
	leased bool

	// event decodes a written record, or the key of a deleted one. name is the key without the directory. Watch does
	// not report a zero Event. It reports no events of a kind whose function is nil.
	event func(name string, kv *mvccpb.KeyValue, deleted bool) (Event, error)
}

// kinds are the kinds that Watch reports or that a restore drops. Only transactions use the others.
var kinds = []kind{
	{dir: dirNodes, event: func(name string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		if deleted {
			return Event{DeletedNode: name}, nil
		}
		n := new(pilasterv1.Node)
		return Event{Node: n}, decode(string(kv.Key), kv.Value, n)
	}},
	{dir: dirTenants, event: func(name string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		if deleted {
			return Event{DeletedTenant: name}, nil
		}
		t := new(pilasterv1.Tenant)
		return Event{Tenant: t}, decode(string(kv.Key), kv.Value, t)
	}},
	{dir: dirApps, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		if deleted {
			return Event{}, nil // see dirAppIDs
		}
		app := new(pilasterv1.App)
		return Event{App: app}, decode(string(kv.Key), kv.Value, app)
	}},
	{dir: dirAppIDs, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		if !deleted {
			return Event{}, nil // see dirApps
		}
		app, err := parseApp(string(kv.Key), dirAppIDs)
		return Event{EndedApp: app}, err
	}},
	{dir: dirAppQuarantine, leased: true, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		app, err := parseApp(string(kv.Key), dirAppQuarantine)
		if deleted {
			return Event{FreedApp: app}, err
		}
		return Event{QuarantinedApp: app}, err
	}},
	{dir: dirHosting, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		h, err := decodeHosting(string(kv.Key), kv.Value)
		if deleted {
			return Event{EndedHosting: h}, err
		}
		return Event{Hosting: h}, err
	}},
	{dir: dirMappings, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		m, err := decodeMapping(string(kv.Key), kv.Value)
		if deleted {
			return Event{EndedMapping: m}, err
		}
		return Event{Mapping: m}, err
	}},
	{dir: dirRegions, event: func(name string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		if deleted {
			return Event{DeletedRegion: name}, nil
		}
		r := new(pilasterv1.Region)
		return Event{Region: r}, decode(string(kv.Key), kv.Value, r)
	}},
	{dir: dirPolicies, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		p, err := decodePolicy(string(kv.Key), kv.Value, kv.ModRevision)
		if deleted {
			return Event{EndedPolicy: p}, err
		}
		return Event{Policy: p}, err
	}},
	{dir: dirServices, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		is, err := decodeService(string(kv.Key), kv.Value)
		if deleted {
			return Event{EndedService: is}, err
		}
		return Event{Service: is}, err
	}},
	{dir: dirEndpoints, event: func(_ string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		is, err := decodeSlice(string(kv.Key), kv.Value)
		if deleted {
			return Event{EndedSlice: is}, err
		}
		return Event{Slice: is}, err
	}},
	{dir: dirSessions, leased: true, event: func(name string, kv *mvccpb.KeyValue, _ bool) (Event, error) {
		return Event{Session: &NodeSession{name, parseSession(string(kv.Value))}}, nil
	}},
	{dir: dirUnreachable, event: func(name string, _ *mvccpb.KeyValue, deleted bool) (Event, error) {
		return Event{Unreachable: &NodeUnreachable{name, !deleted}}, nil
	}},
	{dir: dirLoads, leased: true, event: func(name string, kv *mvccpb.KeyValue, deleted bool) (Event, error) {
		if deleted {
			return Event{EndedLoad: name}, nil
		}
		l := new(pilasterv1.NodeLoad)
		return Event{Load: l}, decode(string(kv.Key), kv.Value, l)
	}},
	{dir: keyOffloadAuto, event: func(_ string, kv *mvccpb.KeyValue, _ bool) (Event, error) {
		on := string(kv.Value) == "on"
		return Event{OffloadAuto: &on}, nil
	}},
	{dir: keyProtected, event: func(_ string, kv *mvccpb.KeyValue, _ bool) (Event, error) {
		all, err := parseProtected(string(kv.Value))
		return Event{Protected: &all}, err
	}},
	{dir: dirQuarantine, leased: true},
	{dir: dirImporter, leased: true},
}

// kindOf returns the kind of a key and the rest of the key; the zero kind for other keys.
func kindOf(key string) (k kind, name string) {
	for _, k := range kinds {
		if name, ok := strings.CutPrefix(key, k.dir); ok {
			return k, name
		}
	}
	return kind{}, ""
}
