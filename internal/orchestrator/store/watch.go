package store

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
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
	Mapping        *pilasterv1.Mapping
	EndedMapping   *pilasterv1.Mapping // with tenant and prefix only
	Region         *pilasterv1.Region
	DeletedRegion  string
	Policy         *pilasterv1.Policy
	EndedPolicy    *pilasterv1.Policy // with tenant, kind, namespace and name only
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
