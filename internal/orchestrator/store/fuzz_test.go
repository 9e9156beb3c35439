package store

import (
	"encoding/json"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"pilaster.io/pilaster/internal/address"
)

// FuzzEvent: an entry of etcd is refused, is of no interest, or says one thing, which lasts when written.
func FuzzEvent(f *testing.F) {
	for key, value := range map[string]string{
		dirNodes + "n1":         `{"name":"n1","uuid":"u1","prefix":"fd70:696c:6100:1::/64","uplinkAddresses":["2001:db8::1"]}`,
		dirTenants + "blue":     `{"name":"blue","addressing":"ADDRESSING_ENCRYPTED","ids":[{"id":1,"key":"AAAAAAAAAAAAAAAAAAAAAA=="}]}`,
		dirApps + "blue/00ff":   `{"tenant":"blue","id":1,"labels":{"app":"web"}}`,
		dirHosting + "blue/n1":  `u1`,
		dirSessions + "n1":      `o1 i1 s1`,
		dirTenantIDs + "1":      `blue`,
		dirAppIDs + "blue/1":    `00ff`,
		dirNodes + "n2":         `{"registered":"never"}`,
		root + "something-else": `x`,
	} {
		f.Add(key, []byte(value), false)
		f.Add(key, []byte(value), true)
	}
	f.Fuzz(func(t *testing.T, key string, value []byte, gone bool) {
		raw := &clientv3.Event{Type: mvccpb.PUT, Kv: &mvccpb.KeyValue{Key: []byte(key), Value: value}}
		if gone {
			raw.Type, raw.Kv.Value = mvccpb.DELETE, nil
		}
		var b Batch
		if err := b.add(raw); err != nil {
			if !strings.HasPrefix(key, dirNodes) && !strings.HasPrefix(key, dirTenants) && !strings.HasPrefix(key, dirApps) {
				t.Fatalf("%q is of no interest, and stops all: %v", key, err)
			}
			return
		}
		if len(b.Events) == 0 {
			return
		}
		e := b.Events[0]
		var record proto.Message
		said := 0
		for name, is := range map[string]bool{
			dirNodes: e.Node != nil || e.DeletedNode != "", dirTenants: e.Tenant != nil || e.DeletedTenant != "",
			dirApps: e.App != nil, dirHosting: e.Hosting != nil, dirSessions: e.Session != nil,
		} {
			if is {
				said++
				if !strings.HasPrefix(key, name) {
					t.Fatalf("%q was taken for one of %s", key, name)
				}
			}
		}
		switch {
		case said > 1 || said == 0 && !gone:
			t.Fatalf("%q says %d things: %+v", key, said, e)
		case e.Node != nil:
			record = e.Node
		case e.Tenant != nil:
			record = e.Tenant
		case e.App != nil:
			record = e.App
		default:
			return
		}
		text, err := protojson.Marshal(record)
		if err != nil {
			return // a time no calendar has; save says so
		}
		back := record.ProtoReflect().New().Interface()
		if err := decode(key, text, back); err != nil || !proto.Equal(record, back) {
			t.Fatalf("%s became %v, %v", text, back, err)
		}
	})
}

// FuzzCluster: a cluster record that is accepted can run a cluster.
func FuzzCluster(f *testing.F) {
	r, err := newCluster(address.Plan{})
	if err != nil {
		f.Fatal(err)
	}
	for _, change := range []func(*clusterRecord){
		func(*clusterRecord) {},
		func(r *clusterRecord) { r.BasePrefix = r.PrivatePrefix },
		func(r *clusterRecord) { r.JoinSecret = append(r.JoinSecret, 1) },
		func(r *clusterRecord) { r.CAKey = nil },
		func(r *clusterRecord) { r.UUID = "" },
	} {
		spoilt := r
		change(&spoilt)
		text, err := json.Marshal(spoilt)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var r clusterRecord
		if json.Unmarshal(text, &r) != nil {
			return
		}
		c, err := r.cluster()
		if err != nil {
			return
		}
		token, err := r.token(c.Authority)
		if err != nil || c.Plan.Validate() != nil || c.UUID == "" || string(token.Secret[:]) != string(r.JoinSecret) || token.CA != c.Authority.Sum() {
			t.Fatalf("accepted %+v, %v", c, err)
		}
	})
}

// FuzzCheckNode: a node's name is fit for a certificate, a key and a file.
func FuzzCheckNode(f *testing.F) {
	const uuid = "00000000-0000-4000-8000-000000000001"
	f.Add("n1.example.org", uuid)
	f.Add("a..b", uuid)
	f.Add("a-", uuid)
	f.Add("n1", "x")
	f.Fuzz(func(t *testing.T, name, id string) {
		if CheckNode(name, id) != nil {
			return
		}
		if name == "" || len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-.") != "" || strings.Contains(name, "..") ||
			strings.ContainsAny(name[:1]+name[len(name)-1:], "-.") || len(id) != len(uuid) || strings.ToLower(id) != id {
			t.Fatalf("node %q with UUID %q was accepted", name, id)
		}
	})
}
