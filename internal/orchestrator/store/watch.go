package store

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Batch is what happened at one revision, or the whole state at one.
type Batch struct {
	Revision int64 // etcd's, above all that a store restored from a backup ever had
	Whole    bool  // Events make the state from nothing
	Cluster  bool  // the cluster's record is among what changed: its join token is another
	Events   []Event
}

// Event is one record that is new, changed or gone. Exactly one of its fields is set.
type Event struct {
	Node           *pilasterv1.Node
	DeletedNode    string
	Tenant         *pilasterv1.Tenant
	DeletedTenant  string // its apps went with it
	App            *pilasterv1.App
	EndedApp       *pilasterv1.App // with tenant and id only, as the next
	QuarantinedApp *pilasterv1.App
	FreedApp       *pilasterv1.App // its number is free
	Hosting        *pilasterv1.Hosting
	EndedHosting   *pilasterv1.Hosting
	Session        *NodeSession
	Mapping        *pilasterv1.Mapping
	EndedMapping   *pilasterv1.Mapping // with tenant and prefix only
	Region         *pilasterv1.Region
	DeletedRegion  string
	Policy         *pilasterv1.Policy
	EndedPolicy    *pilasterv1.Policy // with tenant, kind, namespace and name only

	// Of what a node's Hosting has of it; Watch tells that alone.
	Override      *pilasterv1.Override
	EndedOverride *pilasterv1.Override
}

// NodeSession says which session a node has, or that it has none.
type NodeSession struct {
	Node string
	Session
}

// Watch calls apply with the whole state and then with every change, in order, from one
// goroutine, until ctx ends. It outlives an absent etcd; when it slept through a compaction, or etcd was
// restored from a snapshot meanwhile, it starts over with the whole state.
func (s *Store) Watch(ctx context.Context, apply func(Batch)) error {
	var revision int64 // up to which apply has been told
	for {
		err := s.watch(ctx, &revision, apply)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, errRewound) {
			revision = 0
		}
		s.log.Warn("not following the store; trying again", "error", err, "revision", revision)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// errRewound is that of a watch in a history that etcd no longer has. By itself etcd would say nothing until it
// isWaiting as many revisions again, and then go on from there.
var errRewound = errors.New(
	"etcd has an earlier revision than before: it was restored from a snapshot; everything is read anew",
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
		case <-s.rewound: // that was noticed more than once
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

// readAll reads everything and then decodes it with all processors: a restart of an orchestrator with 100,000 nodes is
// mostly that.
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

// splitByRevision groups events by the transaction that made them.
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

// countFrom makes revisions of etcd those of the store.
func (b *Batch) countFrom(from int64) {
	b.Revision += from
	for _, e := range b.Events {
		if e.Policy != nil {
			e.Policy.Revision += from
		}
	}
}

// decode decodes an event; keys that only allocation needs are none.
func (b *Batch) decode(raw *clientv3.Event) (err error) {
	key, gone := string(raw.Kv.Key), raw.Type == clientv3.EventTypeDelete
	var e Event
	if name, ok := strings.CutPrefix(key, dirNodes); ok {
		if gone {
			e.DeletedNode = name
		} else {
			e.Node = new(pilasterv1.Node)
			err = decode(key, raw.Kv.Value, e.Node)
		}
	} else if name, ok := strings.CutPrefix(key, dirTenants); ok {
		if gone {
			e.DeletedTenant = name
		} else {
			e.Tenant = new(pilasterv1.Tenant)
			err = decode(key, raw.Kv.Value, e.Tenant)
		}
	} else if strings.HasPrefix(key, dirApps) && !gone {
		e.App = new(pilasterv1.App)
		err = decode(key, raw.Kv.Value, e.App)
	} else if strings.HasPrefix(key, dirAppIDs) && gone {
		e.EndedApp, err = parseApp(key, dirAppIDs)
	} else if strings.HasPrefix(key, dirAppQuarantine) {
		to := &e.QuarantinedApp
		if gone {
			to = &e.FreedApp
		}
		*to, err = parseApp(key, dirAppQuarantine)
	} else if strings.HasPrefix(key, dirHosting) {
		to := &e.Hosting
		if gone {
			to = &e.EndedHosting
		}
		*to, err = decodeHosting(key, raw.Kv.Value)
	} else if strings.HasPrefix(key, dirMappings) {
		to := &e.Mapping
		if gone {
			to = &e.EndedMapping
		}
		*to, err = decodeMapping(key, raw.Kv.Value)
	} else if name, ok := strings.CutPrefix(key, dirRegions); ok {
		if gone {
			e.DeletedRegion = name
		} else {
			e.Region = new(pilasterv1.Region)
			err = decode(key, raw.Kv.Value, e.Region)
		}
	} else if strings.HasPrefix(key, dirPolicies) {
		to := &e.Policy
		if gone {
			to = &e.EndedPolicy
		}
		*to, err = decodePolicy(key, raw.Kv.Value, raw.Kv.ModRevision)
	} else if name, ok := strings.CutPrefix(key, dirSessions); ok {
		e.Session = &NodeSession{name, parseSession(string(raw.Kv.Value))}
	} else {
		b.Cluster = b.Cluster || key == keyCluster
		return nil
	}
	b.Events = append(b.Events, e)
	return err
}
