package store

import (
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// kind is a kind of records in the store. To add one, add its directory to store.go and doc.go, a row to kinds, and a
// field to Event.
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
	{dir: dirSessions, leased: true, event: func(name string, kv *mvccpb.KeyValue, _ bool) (Event, error) {
		return Event{Session: &NodeSession{name, parseSession(string(kv.Value))}}, nil
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
