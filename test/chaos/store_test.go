package chaos_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/unixrpc"
)

// dialFrom returns an etcd client whose connections start on the host.
func dialFrom(t *testing.T, h *host, endpoint string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithContextDialer(func(ctx context.Context, address string) (c net.Conn, err error) {
				err = h.ns.Do(func() error {
					c, err = new(net.Dialer).DialContext(ctx, "tcp", address)
					return err
				})
				return c, err
			}),
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// ready waits until etcd and every orchestrator respond, and each orchestrator has etcd's current revision.
func ready(t *testing.T, etcd *clientv3.Client, places []place) {
	t.Helper()
	var revision int64
	await(t, "etcd", func(ctx context.Context) error {
		resp, err := etcd.Get(ctx, "/pilaster/1/cluster")
		if err == nil && resp.Count == 0 {
			err = fmt.Errorf("the cluster has no leader yet")
		}
		if err == nil {
			revision = resp.Header.Revision
		}
		return err
	})
	for i, p := range places {
		await(t, fmt.Sprint("orchestrator ", i), func(ctx context.Context) error {
			status, err := people(p).ClusterStatus(ctx, connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
			if err == nil && status.Msg.Revision < revision {
				err = fmt.Errorf("its cache has revision %d of %d", status.Msg.Revision, revision)
			}
			if err == nil {
				_, err = os.Stat(p.TokenFile)
			}
			return err
		})
	}
}

func people(p place) pilasterv1connect.OperatorServiceClient {
	return pilasterv1connect.NewOperatorServiceClient(unixrpc.Client(orchestrator.Socket(p.RunDir)), unixrpc.URL)
}

// readFinal reads all keys of etcd at one revision.
func readFinal(t *testing.T, etcd *clientv3.Client) final {
	t.Helper()
	resp, err := etcd.Get(t.Context(), "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	f := final{nodes: map[string]*pilasterv1.Node{}, tenants: map[string]*pilasterv1.Tenant{},
		apps:  map[string]map[string]uint32{},
		uuids: map[string]string{}, deleted: map[string]string{}, prefixes: map[string]string{},
		tenantIDs: map[uint32]string{}, hosted: map[string]bool{}, policies: map[string]map[string]string{}}
	for _, kv := range resp.Kvs {
		if err := f.add(string(kv.Key), kv.Value); err != nil {
			t.Errorf("%s: %v", kv.Key, err)
		}
	}
	return f
}

func (f *final) add(key string, value []byte) error {
	path, ours := strings.CutPrefix(key, "/pilaster/1/")
	dir, name, _ := strings.Cut(path, "/")
	if !ours {
		return fmt.Errorf("unexpected prefix")
	}
	switch dir {
	case "nodes":
		f.nodes[name] = new(pilasterv1.Node)
		return record(name, f.nodes[name], value, func() string { return f.nodes[name].Name })
	case "tenants":
		f.tenants[name] = new(pilasterv1.Tenant)
		return record(name, f.tenants[name], value, func() string { return f.tenants[name].Name })
	case "apps":
		tenant, _, _ := strings.Cut(name, "/")
		app := new(pilasterv1.App)
		if f.apps[tenant] == nil {
			f.apps[tenant] = map[string]uint32{}
		}
		if err := record(tenant, app, value, app.GetTenant); err != nil {
			return err
		}
		f.apps[tenant][app.Labels["app"]] = app.Id
	case "uuids":
		f.uuids[name] = string(value)
	case "deleted":
		f.deleted[name] = string(value)
	case "prefixes":
		f.prefixes[name] = string(value)
	case "tenant-ids":
		id, err := strconv.ParseUint(name, 10, 32)
		f.tenantIDs[uint32(id)] = string(value)
		return err
	case "hosting":
		tenant, _, _ := strings.Cut(name, "/")
		f.hosted[tenant] = true
	case "policies":
		words, p := strings.Split(name, "/"), new(pilasterv1.Policy)
		if err := protojson.Unmarshal(value, p); err != nil || len(words) != 4 || words[1] != "NetworkPolicy" ||
			words[2] != "default" {
			return fmt.Errorf("not a policy of a client: %v, %v", p, err)
		}
		if f.policies[words[0]] == nil {
			f.policies[words[0]] = map[string]string{}
		}
		as, err := ruledAs(p)
		f.policies[words[0]][words[3]] = as
		return err
	case "cluster", "marks", "app-ids", "deletions":
	default:
		return fmt.Errorf("unknown key: extend this test")
	}
	return nil
}

func record(name string, m proto.Message, value []byte, named func() string) error {
	if err := protojson.Unmarshal(value, m); err != nil {
		return err
	}
	if named() != name {
		return fmt.Errorf("belongs to %q", named())
	}
	return nil
}

// last returns the newest ID of a tenant. Older IDs retire.
func last(t *pilasterv1.Tenant) uint32 { return t.Ids[len(t.Ids)-1].Id }

// compare compares an orchestrator's view with the store.
func compare(t *testing.T, p place, f final) {
	t.Helper()
	nodes, err := people(p).ListNodes(t.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Msg.Nodes {
		if !proto.Equal(n, f.nodes[n.Name]) {
			t.Errorf("orchestrator %s has node %v, and the store has %v", p.URL, n, f.nodes[n.Name])
		}
	}
	tenants, err := people(p).ListTenants(t.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, shown := range tenants.Msg.Tenants {
		if known := f.tenants[shown.Name]; known == nil || last(known) != last(shown) {
			t.Errorf("orchestrator %s has tenant %v, and the store has %v", p.URL, shown, known)
		}
	}
	policies, err := people(p).ListPolicies(t.Context(), connect.NewRequest(&pilasterv1.ListPoliciesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	has := 0
	for _, of := range f.policies {
		has += len(of)
	}
	for _, shown := range policies.Msg.Policies {
		if has--; f.policies[shown.Tenant][shown.Name] == "" {
			t.Errorf("orchestrator %s has policy %v, which the store lacks", p.URL, shown)
		}
	}
	if has != 0 {
		t.Errorf("orchestrator %s has %d policies, and the store has %d more", p.URL, len(policies.Msg.Policies), has)
	}
	if len(nodes.Msg.Nodes) != len(f.nodes) || len(tenants.Msg.Tenants) != len(f.tenants) {
		t.Errorf("orchestrator %s has %d nodes and %d tenants, and the store has %d and %d", p.URL,
			len(nodes.Msg.Nodes), len(tenants.Msg.Tenants), len(f.nodes), len(f.tenants))
	}
}
