package store

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/fuzzmutate"
	"pilaster.io/pilaster/internal/service"
)

// FuzzEvent checks that a key of etcd is refused, ignored, or decoded into one event, which stays equal when encoded
// and decoded again.
func FuzzEvent(f *testing.F) {
	for key, value := range map[string]string{
		dirNodes + "n1": `{"name":"n1","uuid":"u1","prefix":"fd70:696c:6100:1::/64",` +
			`"uplinkAddresses":["2001:db8::1"]}`,
		dirTenants + "blue": `{"name":"blue","addressing":"ADDRESSING_ENCRYPTED",` +
			`"ids":[{"id":1,"key":"AAAAAAAAAAAAAAAAAAAAAA=="}]}`,
		dirApps + "blue/00ff":            `{"tenant":"blue","id":1,"labels":{"app":"web"}}`,
		dirHosting + "blue/n1":           `u1`,
		dirSessions + "n1":               `o1 i1 s1`,
		dirTenantIDs + "1":               `blue`,
		dirAppIDs + "blue/1":             `00ff`,
		dirMappings + "blue/0a000300/24": `{"node":"fd70:696c:6100:1::/64","name":"n1"}`,
		dirMappings + "blue/0a000005/32": `{"node":"fd70:696c:6100:1::/64","name":"n1","key":"c/eth0"}`,
		dirNodes + "n2":                  `{"registered":"never"}`,
		dirHosting + "red/n1":            `{"accepts":[1,2],"holds":[2]}`,
		dirPolicies + "blue/Kind/shop/w": `{"document":"{}","audit":true,"rules":2}`,
		dirPolicies + "blue/Kind//web":   `{"document":"{}"}`,
		dirServices + "blue/shop/web":    `{"address":"fd70:696c:7300:1::1"}`,
		dirServices + "blue//web":        `{"headless":true}`,
		dirEndpoints + "blue//web/n1.0":  `{"node":"n1","endpoints":[{"address":"fd70::1"}]}`,
		root + "something-else":          `x`,
	} {
		f.Add(key, []byte(value), fuzzmutate.Nothing, false)
		f.Add(key, []byte(value), fuzzmutate.Nothing, true)
	}
	f.Fuzz(func(t *testing.T, key string, value, script []byte, gone bool) {
		value = fuzzmutate.JSON(value, script)
		raw := &clientv3.Event{Type: mvccpb.PUT, Kv: &mvccpb.KeyValue{Key: []byte(key), Value: value}}
		if gone {
			raw.Type, raw.Kv.Value = mvccpb.DELETE, nil
		}
		var b Batch
		if err := b.decode(raw); err != nil {
			decoded := []string{
				dirNodes, dirTenants, dirApps, dirAppIDs, dirAppQuarantine, dirHosting, dirMappings, dirPolicies,
				dirServices, dirEndpoints,
			}
			if !slices.ContainsFunc(decoded, func(dir string) bool { return strings.HasPrefix(key, dir) }) {
				t.Fatalf("%q should be ignored, but the watch fails: %v", key, err)
			}
			return
		}
		if len(b.Events) == 0 {
			return
		}
		e := b.Events[0]
		var record proto.Message
		fields := 0
		for name, is := range map[string]bool{
			dirNodes:    e.Node != nil || e.DeletedNode != "",
			dirTenants:  e.Tenant != nil || e.DeletedTenant != "",
			dirApps:     e.App != nil,
			dirHosting:  e.Hosting != nil,
			dirSessions: e.Session != nil,
			dirMappings: e.Mapping != nil || e.EndedMapping != nil,
			dirPolicies: e.Policy != nil || e.EndedPolicy != nil,
			dirServices: e.Service != nil || e.EndedService != nil,

			dirEndpoints: e.Slice != nil || e.EndedSlice != nil,
		} {
			if is {
				fields++
				if !strings.HasPrefix(key, name) {
					t.Fatalf("%q was decoded as a key of %s", key, name)
				}
			}
		}
		switch {
		case fields > 1 || fields == 0 && !gone:
			t.Fatalf("%q was decoded into %d fields, want 1: %+v", key, fields, e)
		case e.Node != nil:
			record = e.Node
		case e.Tenant != nil:
			record = e.Tenant
		case e.App != nil:
			record = e.App
		case e.Session != nil && !gone:
			// A value of three words is encoded as it was read.
			if is := e.Session.Session.String(); strings.Count(string(value), " ") >= 2 && is != string(value) {
				t.Fatalf("session %q was encoded as %q", value, is)
			}
			return
		case e.Mapping != nil, e.EndedMapping != nil:
			m := cmp.Or(e.Mapping, e.EndedMapping)
			if to, err := netip.ParsePrefix(m.To); err != nil || strings.Contains(m.Tenant, "/") ||
				mappingKey(m.Tenant, to) != key {
				t.Fatalf("%q was decoded as a mapping of tenant %q, prefix %q", key, m.Tenant, m.To)
			}
			return
		case e.Policy != nil, e.EndedPolicy != nil:
			if p := cmp.Or(e.Policy, e.EndedPolicy); policyKey(p.Tenant, p) != key {
				t.Fatalf("%q was decoded as policy %v", key, p)
			}
			return
		case e.Service != nil, e.EndedService != nil:
			if is := cmp.Or(e.Service, e.EndedService); serviceKey(is.Tenant, service.Name{
				Namespace: is.Namespace, Name: is.Name}) != key {
				t.Fatalf("%q was decoded as service %v", key, is)
			}
			return
		case e.Slice != nil, e.EndedSlice != nil:
			is := cmp.Or(e.Slice, e.EndedSlice)
			if sliceKey(is.Tenant, service.ParseName(is.Service), is.Name) != key {
				t.Fatalf("%q was decoded as endpoints %v", key, is)
			}
			return
		default:
			if h := cmp.Or(e.Hosting, e.EndedHosting); h != nil &&
				strings.Count(key, "/") > strings.Count(dirHosting, "/") &&
				hostingKey(h.Tenant, h.Node) != key {
				t.Fatalf("%q was decoded as tenant %q on node %q", key, h.Tenant, h.Node)
			}
			return
		}
		text, err := protojson.Marshal(record)
		if err != nil {
			return // a time out of range, which save also refuses
		}
		decoded := record.ProtoReflect().New().Interface()
		if err := decode(key, text, decoded); err != nil || !proto.Equal(record, decoded) {
			t.Fatalf("%s was decoded as %v, %v", text, decoded, err)
		}
	})
}

// FuzzCluster checks that an accepted cluster record is valid and complete.
func FuzzCluster(f *testing.F) {
	r, err := newCluster(address.Plan{})
	if err != nil {
		f.Fatal(err)
	}
	good, err := json.Marshal(r)
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
		changed := r
		change(&changed)
		text, err := json.Marshal(changed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, fuzzmutate.Nothing)
	}
	f.Fuzz(func(t *testing.T, text, script []byte) {
		var r clusterRecord
		if json.Unmarshal(fuzzmutate.JSON(text, script, string(good)), &r) != nil {
			return
		}
		c, err := r.cluster()
		if err != nil {
			return
		}
		token, err := r.token(c.Authority)
		if err != nil || c.Plan.Validate() != nil || c.UUID == "" || string(token.Secret[:]) != string(r.JoinSecret) ||
			token.CA != c.Authority.Sum() {
			t.Fatalf("accepted the invalid cluster %+v, %v", c, err)
		}
	})
}

// FuzzCheckNode checks that CheckNode accepts exactly the names that fit a certificate, a key of etcd and a file name,
// and exactly the valid UUIDs.
func FuzzCheckNode(f *testing.F) {
	const uuid = "00000000-0000-4000-8000-00000000000f"
	f.Add("n1.example.org", uuid)
	f.Add(strings.Repeat("a", 62), uuid)
	f.Add("a-b", "x")
	f.Fuzz(func(t *testing.T, name, id string) {
		const letters, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"
		valid := len(name) <= 63
		for _, label := range strings.Split(name, ".") {
			valid = valid && label != "" && strings.Trim(label, letters+digits+"-") == "" && label[0] != '-' &&
				label[len(label)-1] != '-'
		}
		groups := strings.Split(id, "-")
		valid = valid && len(groups) == 5 && strings.Trim(id, "abcdef-"+digits) == ""
		for i, n := range []int{8, 4, 4, 4, 12} {
			valid = valid && len(groups[i]) == n
		}
		if err := CheckNode(name, id); (err == nil) != valid {
			t.Fatalf("node %q with UUID %q, valid %v: got %v", name, id, valid, err)
		}
	})
}

// FuzzPageToken checks that an accepted token has the form that a page writes, and names a possible key of a mapping.
func FuzzPageToken(f *testing.F) {
	form := regexp.MustCompile(`^-?[1-9][0-9]*:[0-9a-f]{8}([0-9a-f]{24})?/(0|[1-9][0-9]*)$`)
	for _, token := range []string{
		"17:0a000300/24", "1:" + strings.Repeat("0", 32) + "/128", "", ":", "-1:0a000300/33", "1:0a00/24",
	} {
		f.Add(token)
	}
	f.Fuzz(func(t *testing.T, token string) {
		if after, err := ParsePageToken(token); err == nil && after.Revision != 0 && !form.MatchString(token) {
			t.Fatalf("%q was accepted as %+v", token, after)
		}
	})
}
