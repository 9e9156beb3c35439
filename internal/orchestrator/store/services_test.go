package store_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
)

// web returns a service with a port, by "NAME" or "NAMESPACE/NAME", and perhaps an address.
func web(name string, wanted ...string) service.Service {
	s := service.Service{Name: service.ParseName(name), Ports: []service.Port{{Protocol: service.TCP, Port: 80,
		Target: 80}}}
	for _, a := range wanted {
		s.Address = netip.MustParseAddr(a)
	}
	return s
}

// endpoints returns a slice of a service.
func endpoints(of, name string, addresses ...string) service.Slice {
	s := service.Slice{Tenant: "blue", Service: service.ParseName(of), Name: name}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, service.Endpoint{Address: netip.MustParseAddr(a)})
	}
	return s
}

// appliedServices applies services and formats the results.
func appliedServices(t *testing.T, s *store.Store, name string, services []service.Service,
	fixed ...service.Slice) string {
	t.Helper()
	return formatApplied(t, s, name, store.ApplyingServices{}, services, fixed...)
}

func formatApplied(t *testing.T, s *store.Store, name string, how store.ApplyingServices, services []service.Service,
	fixed ...service.Slice) string {
	t.Helper()
	applied, err := s.ApplyServices(t.Context(), name, services, fixed, how)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, a := range applied {
		of := service.Name{Namespace: a.Service.Namespace, Name: a.Service.Name}
		all = append(all, fmt.Sprint(a.Service.Tenant, " ", of, " ", a.Service.Address, " ", a.Action))
	}
	return strings.Join(all, "; ")
}

// keysOf lists the keys below services/ and endpoints/.
func keysOf(t *testing.T, etcd *clientv3.Client) string {
	t.Helper()
	keys := slices.Sorted(maps.Keys(revisions(t, etcd, "services/")))
	for _, key := range slices.Sorted(maps.Keys(revisions(t, etcd, "endpoints/"))) {
		keys = append(keys, "e:"+key)
	}
	return strings.Join(keys, " ")
}

func testServiceAddresses(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	nimitz(t, s, "green", "fd12:3456::/48")
	before := stored(t, s, "blue").Changes
	try := formatApplied(t, s, "blue", store.ApplyingServices{DryRun: true}, []service.Service{web("web")})
	if try != "blue web fd70:696c:7300:1::1 created" || keysOf(t, etcd) != "" ||
		stored(t, s, "blue").ServicesNumber != 0 {
		t.Errorf("a dry run: %s, and the store has %s", try, keysOf(t, etcd))
	}
	headless := web("shop/db")
	headless.Headless = true
	changed := web("web")
	changed.Affinity = time.Minute
	for _, c := range []struct {
		tenant   string
		services []service.Service
		want     string
	}{
		{"blue", []service.Service{web("web"), headless},
			"blue web fd70:696c:7300:1::1 created; blue shop/db  created"},
		{"red", []service.Service{web("web")}, "red web fd70:696c:7300:2::1 created"},
		{"blue", []service.Service{web("web"), web("shop/web")},
			"blue web fd70:696c:7300:1::1 unchanged; blue shop/web fd70:696c:7300:1::2 created"},
		{"blue", []service.Service{web("three", "fd70:696c:7300:1::3")}, "blue three fd70:696c:7300:1::3 created"},
		{"blue", []service.Service{web("last", "fd70:696c:7300:1:0:0:ffff:ffff"), web("four")},
			"blue last fd70:696c:7300:1::ffff:ffff created; blue four fd70:696c:7300:1::4 created"},
		{"blue", []service.Service{changed}, "blue web fd70:696c:7300:1::1 configured"},
		{"blue", []service.Service{changed, web("three", "fd70:696c:7300:1::3")},
			"blue web fd70:696c:7300:1::1 unchanged; blue three fd70:696c:7300:1::3 unchanged"},
	} {
		if got := appliedServices(t, s, c.tenant, c.services); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
	if blue := stored(t, s, "blue"); blue.ServicesNumber != 1 || blue.Changes != before+1 {
		t.Errorf("blue has number %d and %d changes; want 1 and %d", blue.ServicesNumber, blue.Changes, before+1)
	}
	if err := s.DeleteService(t.Context(), "blue", service.ParseName("four")); err != nil {
		t.Fatal(err)
	}
	if got := appliedServices(t, s, "blue", []service.Service{web("four")}); got !=
		"blue four fd70:696c:7300:1::5 created" {
		t.Errorf("an address was allocated again: %s", got)
	}
	if got := appliedServices(t, s, "blue", []service.Service{web("old", "fd70:696c:7300:1::4")}); got !=
		"blue old fd70:696c:7300:1::4 created" {
		t.Errorf("an address that no service has any more: %s", got)
	}

	// A container with host ports needs the number without a service.
	register(t, s, 1)
	if _, err := s.CreateTenant(t.Context(), "bare", 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		is, _, err := s.ResolveExposing(t.Context(), node(1), 1, "bare", nil)
		if err != nil || is.ServicesNumber != 3 || stored(t, s, "bare").ServicesNumber != 3 {
			t.Errorf("a tenant with host ports: got %v, %v; want number 3", is, err)
		}
	}
	if is, _, err := s.ResolveExposing(t.Context(), node(1), 1, "green", nil); err == nil && is.ServicesNumber != 0 {
		t.Errorf("a tenant on a network without services got number %d", is.ServicesNumber)
	}

	keys, few := keysOf(t, etcd), func(name string) []service.Service { return []service.Service{web(name)} }
	nowHeadless := web("web")
	nowHeadless.Headless = true
	for _, c := range []struct {
		tenant   string
		services []service.Service
		how      store.ApplyingServices
		reason   store.Reason
		says     string
	}{
		{"green", few("web"), store.ApplyingServices{}, store.Refused,
			"on network nimitz, and only tenants of network netpila"},
		{"pink", few("web"), store.ApplyingServices{}, store.NotFound, `no tenant "pink"`},
		{"Pink", few("web"), store.ApplyingServices{}, store.Invalid, "tenant name"},
		{"blue", nil, store.ApplyingServices{}, store.Invalid, "no service"},
		{"blue", few("Web"), store.ApplyingServices{}, store.Invalid, `service name "Web"`},
		{"blue", append(few("new"), web("new")), store.ApplyingServices{}, store.Invalid, "service new is there twice"},
		{"blue", append(few("new"), web("web")), store.ApplyingServices{New: true}, store.Exists,
			"has service web already"},
		{"blue", append(few("new"), nowHeadless), store.ApplyingServices{}, store.Refused, "cannot become headless"},
		{"blue", []service.Service{web("web", "fd70:696c:7300:1::9")}, store.ApplyingServices{}, store.Refused,
			"has address fd70:696c:7300:1::1 and cannot change"},
		{"blue", []service.Service{web("new"), web("new2", "fd70:696c:7300:1::3")}, store.ApplyingServices{},
			store.Exists, "service three has address fd70:696c:7300:1::3 already"},
		{"blue", []service.Service{web("new", "fd70:696c:7300:2::9")}, store.ApplyingServices{}, store.Invalid,
			"none of the tenant's for services, which are fd70:696c:7300:1::1 to fd70:696c:7300:1::ffff:ffff"},
		{"blue", []service.Service{web("new", "fd70:696c:7300:1::")}, store.ApplyingServices{}, store.Invalid,
			"none of the tenant's"},
		{"blue", []service.Service{web("new", "fd70:696c:7300:1:0:1::")}, store.ApplyingServices{}, store.Invalid,
			"none of the tenant's"},
	} {
		_, err := s.ApplyServices(t.Context(), c.tenant, c.services, nil, c.how)
		refused(t, err, c.reason, c.says)
	}
	refused(t, s.DeleteService(t.Context(), "blue", service.ParseName("new")), store.NotFound, "has no service new",
		"pilaster service list --tenant blue")
	refused(t, s.DeleteService(t.Context(), "pink", service.ParseName("web")), store.NotFound, `no tenant "pink"`)
	if got := keysOf(t, etcd); got != keys || stored(t, s, "blue").Changes != before+1 {
		t.Errorf("refused changes made the store %s, want %s", got, keys)
	}
	if err := s.DeleteTenant(t.Context(), "blue"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	if got := appliedServices(t, s, "blue", few("web")); got != "blue web fd70:696c:7300:4::1 created" ||
		keysOf(t, etcd) != "blue//web red//web" {
		t.Errorf("a new tenant of the same name: %s, and the store has %s", got, keysOf(t, etcd))
	}
}

// testManyServices: services of one call are changed in one transaction, or refused.
func testManyServices(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	most := 60
	if len(etcd.Endpoints()) == 0 {
		most = 508
	}
	var all []service.Service
	for i := range most + 1 {
		all = append(all, web(fmt.Sprint("s", i)))
	}
	_, err := s.ApplyServices(t.Context(), "blue", all, nil, store.ApplyingServices{})
	refused(t, err, store.Full, fmt.Sprint(most, " services or ", 2*most, " slices"), "nothing was changed")
	if got := keysOf(t, etcd); got != "" {
		t.Errorf("the store has %s, want nothing", got)
	}
	appliedServices(t, s, "blue", all[:most])
	same := map[int64]bool{}
	for _, revision := range revisions(t, etcd, "services/blue/") {
		same[revision] = true
	}
	if n := len(revisions(t, etcd, "service-addresses/blue/")); n != most || len(same) != 1 {
		t.Errorf("%d services have addresses, of %d transactions; want %d of one", n, len(same), most)
	}

	// More addresses were chosen than a transaction compares, and the next one is beyond them.
	if _, err := s.CreateTenant(t.Context(), "red", 0); err != nil {
		t.Fatal(err)
	}
	n := 0
	for n <= 2*most+16 {
		var chosen []service.Service
		for range most {
			n++
			chosen = append(chosen, web(fmt.Sprint("s", n), fmt.Sprintf("fd70:696c:7300:2::%x", n)))
		}
		appliedServices(t, s, "red", chosen)
	}
	for i := range 2 {
		want := fmt.Sprintf("red next%d fd70:696c:7300:2::%x created", i, n+1+i)
		if got := appliedServices(t, s, "red", []service.Service{web(fmt.Sprint("next", i))}); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	for _, name := range []string{"blue", "red"} {
		if err := s.DeleteTenant(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if got := revisions(t, etcd, "service"); len(got) != 0 {
		t.Errorf("without the tenant the store has %v", got)
	}
}

// testServicePrefix: services and others do not share addresses.
func testServicePrefix(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{Base: netip.MustParsePrefix("fd70:696c:7300::/48")})
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	_, err := s.ApplyServices(t.Context(), "blue", []service.Service{web("web")}, nil, store.ApplyingServices{})
	refused(t, err, store.Refused, "overlaps this cluster's fd70:696c:7300::/48")
	if _, err := etcd.Delete(t.Context(), "/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	s = open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(t.Context(), "blue", 0); err != nil {
		t.Fatal(err)
	}
	uplinks := store.Registration{Node: node(1), Uplinks: []netip.Addr{netip.MustParseAddr("fd70:696c:73ff::9")}}
	if _, err := s.Register(t.Context(), uplinks); err != nil {
		t.Fatal(err)
	}
	_, err = s.ApplyServices(t.Context(), "blue", []service.Service{web("web")}, nil, store.ApplyingServices{})
	refused(t, err, store.Refused, "overlaps fd70:696c:73ff::9/128, an address of node n1")
	_, _, err = s.ResolveExposing(t.Context(), node(1), 1, "blue", nil)
	refused(t, err, store.Invalid, "host ports need a number for services of tenant blue", "an address of node n1")
	_, err = store.Open(t.Context(), etcd, address.Plan{Egress: netip.MustParsePrefix("fd70:696c:7300::/48")},
		slog.Default())
	refused(t, err, store.Invalid, "overlaps fd70:696c:7300::/40, which has the addresses of services")
}

// testEndpoints: fixed endpoints of operators, and those that nodes report.
func testEndpoints(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	blue, err := s.CreateTenant(ctx, "blue", 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateTenant(ctx, "red", 0); err != nil {
		t.Fatal(err)
	}
	hosts(t, s, "blue", 1, 2)
	hosts(t, s, "red", 1)
	plain := func(node, index int) string { return fmt.Sprintf("fd70:696c:6100:%x:0:100:100:%x", node, index) }
	seen := address.NewCipher(address.Key(blue.Ids[0].Key)).Encrypt(netip.MustParseAddr(plain(2, 7))).String()
	got := appliedServices(t, s, "blue", []service.Service{web("web")}, endpoints("web", "fixed", seen, plain(1, 9)))
	if got != "blue web fd70:696c:7300:1::1 created" {
		t.Errorf("got %s", got)
	}
	_, err = s.ApplyServices(ctx, "blue", nil, []service.Slice{endpoints("web", "fixed", plain(2, 7), seen)},
		store.ApplyingServices{})
	refused(t, err, store.Invalid, seen+" and an endpoint before it are the same container", "nothing was changed")
	value := func(key string) string {
		resp, err := etcd.Get(ctx, "/pilaster/1/endpoints/"+key)
		if err != nil || len(resp.Kvs) != 1 {
			return fmt.Sprint("none ", err)
		}
		return strings.ReplaceAll(string(resp.Kvs[0].Value), " ", "")
	}
	fixed := `{"endpoints":[{"address":"` + plain(2, 7) + `"},{"address":"` + plain(1, 9) + `"}]}`
	if got := value("blue//web/fixed"); got != fixed {
		t.Errorf("fixed endpoints are %s, want %s", got, fixed)
	}
	if got := appliedServices(t, s, "blue", nil, endpoints("web", "fixed", plain(2, 7), plain(1, 9))); got !=
		"blue web fd70:696c:7300:1::1 unchanged" {
		t.Errorf("equal endpoints: %s", got)
	}
	for _, c := range []struct {
		is     service.Slice
		reason store.Reason
		says   string
	}{
		{endpoints("web", "fixed", "2001:db8::1"), store.Invalid,
			"2001:db8::1 cannot be the address of a container of tenant blue"},
		{endpoints("web", "fixed", "fd70:696c:6100:1:0:200:100:9"), store.Invalid, "cannot be the address"}, // red's
		{endpoints("web", "fixed", "fd70:696c:6100:1:0:1ff:100:9"), store.Invalid, "cannot be the address"}, // egress
		{endpoints("web", "n1.0", plain(1, 9)), store.Invalid, `name of fixed endpoints "n1.0"`},
		{endpoints("db", "fixed", plain(1, 9)), store.NotFound, "has no service db"},
	} {
		_, err := s.ApplyServices(ctx, "blue", []service.Service{web("new")}, []service.Slice{c.is},
			store.ApplyingServices{})
		refused(t, err, c.reason, c.says, "nothing was changed")
	}

	put := func(n int, all ...service.Slice) error { return s.PutEndpoints(ctx, node(n), all) }
	if err := put(1, endpoints("web", "n1.0", plain(1, 1), plain(1, 2)), endpoints("web", "n1.1", plain(1, 3)),
		endpoints("gone", "n1.0", plain(1, 1))); err != nil {
		t.Fatal(err)
	}
	ofRed := endpoints("web", "n2.0", plain(2, 1))
	ofRed.Tenant = "red" // which node 2 does not host
	appliedServices(t, s, "red", []service.Service{web("web")})
	if err := put(2, endpoints("web", "n2.0", plain(2, 1)), ofRed); err != nil {
		t.Fatal(err)
	}
	all := "blue//web red//web e:blue//web/fixed e:blue//web/n1.0 e:blue//web/n1.1 e:blue//web/n2.0"
	if got := keysOf(t, etcd); got != all {
		t.Errorf("the store has %s, want %s", got, all)
	}
	for _, c := range []struct {
		is     service.Slice
		reason store.Reason
		says   string
	}{
		{endpoints("web", "n2.0", plain(1, 1)), store.Invalid, "node n1 writes endpoints with names n1.0"},
		{endpoints("web", "fixed", plain(1, 1)), store.Invalid, "node n1 writes endpoints with names n1.0"},
		{endpoints("web", "n1.0", plain(2, 1)), store.Refused, "cannot be the address of its container"},
		{endpoints("web", "n1.0", "fd70:696c:6100:1:0:200:100:9"), store.Refused, "cannot be the address"},
		{endpoints("web", "n1.0", seen), store.Refused, "cannot be the address"},
		{endpoints("Web", "n1.0", plain(1, 1)), store.Invalid, `service name "Web"`},
	} {
		refused(t, put(1, endpoints("web", "n1.1"), c.is), c.reason, c.says, "nothing was changed")
	}
	refused(t, put(3, endpoints("web", "n3.0", plain(3, 1))), store.Refused, "not registered")
	revision := s.Revision()
	if err := put(1, endpoints("web", "n1.1", plain(1, 3)), endpoints("web", "n1.2")); err != nil ||
		s.Revision() != revision {
		t.Errorf("equal endpoints: %v, revision %d, want %d", err, s.Revision(), revision)
	}
	if got := keysOf(t, etcd); got != all {
		t.Errorf("refused endpoints made the store %s, want %s", got, all)
	}
	if err := put(1, endpoints("web", "n1.1"), endpoints("web", "n1.0", plain(1, 2))); err != nil {
		t.Fatal(err)
	}
	one := `{"node":"n1","endpoints":[{"address":"` + plain(1, 2) + `"}]}`
	if got := value("blue//web/n1.0"); got != one {
		t.Errorf("endpoints of a node are %s, want %s", got, one)
	}

	// The endpoints of a node end when it hosts the tenant no longer, and when it is deleted; all end with the service.
	appliedServices(t, s, "blue", []service.Service{web("shop/web")})
	if err := put(2, endpoints("shop/web", "n2.0", plain(2, 1))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RecordHosting(ctx, node(1), 9, nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	const services = "blue//web blue/shop/web red//web "
	if got := keysOf(t, etcd); got != services+"e:blue//web/fixed e:blue//web/n2.0 e:blue/shop/web/n2.0" {
		t.Errorf("without tenant blue on node 1 the store has %s", got)
	}
	if err := s.DeleteNode(ctx, "n2", true); err != nil {
		t.Fatal(err)
	}
	if got := keysOf(t, etcd); got != services+"e:blue//web/fixed" {
		t.Errorf("without node 2 the store has %s", got)
	}
	got = appliedServices(t, s, "blue", nil, endpoints("shop/web", "a", plain(1, 1)), endpoints("web", "fixed"))
	if got != "blue shop/web fd70:696c:7300:1::2 configured; blue web fd70:696c:7300:1::1 configured" ||
		keysOf(t, etcd) != services+"e:blue/shop/web/a" {
		t.Errorf("got %s, and the store has %s", got, keysOf(t, etcd))
	}
	if err := s.DeleteService(ctx, "blue", service.ParseName("shop/web")); err != nil {
		t.Fatal(err)
	}
	if got := keysOf(t, etcd); got != "blue//web red//web" {
		t.Errorf("without service shop/web the store has %s", got)
	}
}

// testServiceEvents: a watch reports services and slices, with the fields that are in their keys.
func testServiceEvents(t *testing.T, etcd *clientv3.Client) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s := open(t, etcd, address.Plan{})
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	got, ready := make(chan string, 16), make(chan bool, 1)
	go s.Watch(ctx, func(b store.Batch) {
		if b.Whole {
			ready <- true
		}
		for _, e := range b.Events {
			for what, is := range map[string]*pilasterv1.Service{"+": e.Service, "-": e.EndedService} {
				if is != nil {
					got <- fmt.Sprint(what, is.Tenant, " ", is.Namespace, "/", is.Name, " ", is.Address)
				}
			}
			for what, is := range map[string]*pilasterv1.EndpointSlice{"+": e.Slice, "-": e.EndedSlice} {
				if is != nil {
					got <- fmt.Sprint(what, is.Tenant, " ", is.Service, " ", is.Name, " ", len(is.Endpoints))
				}
			}
		}
	})
	<-ready
	appliedServices(t, s, "blue", []service.Service{web("shop/web")}, endpoints("shop/web", "a",
		"fd70:696c:6100:1:0:100:100:1"))
	if err := s.DeleteService(ctx, "blue", service.ParseName("shop/web")); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"+blue shop/web fd70:696c:7300:1::1", "+blue shop/web a 1", "-blue shop/web ", "-blue shop/web a 0",
	}
	var all []string
	for range want {
		select {
		case is := <-got:
			all = append(all, is)
		case <-ctx.Done():
			t.Fatalf("the watch reports %q, want %q", all, want)
		}
	}
	for i := 0; i < len(all); i += 2 { // in one transaction, in any order
		slices.Sort(all[i : i+2])
		slices.Sort(want[i : i+2])
	}
	if !slices.Equal(all, want) {
		t.Errorf("the watch reports %q, want %q", all, want)
	}
}

// A restored store has the services, and skips numbers and addresses that may have been allocated since the backup.
func TestRestoreServices(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, e.Client, address.Plan{})
	for _, name := range []string{"blue", "red"} {
		if _, err := s.CreateTenant(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
	}
	isWeb := exposed("web", "80=30080", "2001:db8:7::a")
	appliedServices(t, s, "blue", []service.Service{isWeb}, endpoints("web", "a", "fd70:696c:6100:1:0:100:100:1"))
	file := filepath.Join(t.TempDir(), "backup")
	if _, err := store.Backup(t.Context(), dir, file, log); err != nil {
		t.Fatal(err)
	}
	e.Close()
	dir = t.TempDir()
	if _, err := store.Restore(t.Context(), file, dir, 0x1000, log); err != nil {
		t.Fatal(err)
	}
	if e, err = store.Embed(t.Context(), dir, log); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s = open(t, e.Client, address.Plan{})
	if got := keysOf(t, e.Client); got != "blue//web e:blue//web/a" {
		t.Errorf("the restored store has %s", got)
	}
	_, err = s.ApplyServices(t.Context(), "red", []service.Service{isWeb}, nil, store.ApplyingServices{})
	refused(t, err, store.Exists, "is that of services of tenant blue")
	if got := appliedServices(t, s, "blue", []service.Service{isWeb, web("new")}); got !=
		"blue web fd70:696c:7300:1::1 unchanged; blue new fd70:696c:7300:1::1002 created" {
		t.Errorf("services of blue: %s", got)
	}
	if got := appliedServices(t, s, "red", []service.Service{web("web")}); got !=
		"red web fd70:696c:7300:1002::1 created" {
		t.Errorf("services of red: %s", got)
	}
}
