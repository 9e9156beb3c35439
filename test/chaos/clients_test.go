package chaos_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/unixrpc"
)

// place is how clients reach an orchestrator.
type place struct{ URL, RunDir, TokenFile string }

// work is the job of the process with all clients. The clients work until their calls have made Changes changes and
// standard input is closed.
type work struct {
	Places  []place
	Dir     string // for logs and the nodes' state
	Seed    uint64
	Clients int
	Changes int64
}

// Kinds of calls.
const (
	register = "register a node"
	remove   = "delete a node"
	create   = "create a tenant"
	destroy  = "delete a tenant"
	rotate   = "rotate a key"
	resolve  = "resolve labels"
	publish  = "publish a container"
	withdraw = "end a publication"
	rule     = "apply policies"
	unrule   = "delete policies"
)

// Outcomes of a call. A refused call has changed nothing. A call without a response may or may not have taken effect.
const (
	done    = "done"
	refused = "refused"
	unknown = "unknown"
)

// entry is a call in a client's log.
type entry struct {
	Client          int
	Place           int
	Asked, Answered time.Duration // since the start of all clients, on one clock

	Ask    string
	Name   string // of the node or tenant
	Of     int    `json:",omitempty"` // number of the machine, among those that use the name
	Wanted string `json:",omitempty"` // requested prefix
	Label  string `json:",omitempty"`

	Outcome string
	Code    string `json:",omitempty"`
	Error   string `json:",omitempty"`
	Prefix  string `json:",omitempty"`
	ID      uint32 `json:",omitempty"` // tenant ID
	App     uint32 `json:",omitempty"`

	Underlay string `json:",omitempty"` // address of a publication
	Change   string `json:",omitempty"` // change of policies
}

const (
	rivals    = 3               // machines that compete for one name
	window    = 6               // number of names in use at a time
	perName   = 60              // changes of any kind before the window moves
	patience  = 3 * time.Second // timeout of a client; an orchestrator may process a call for up to 10 s
	labels    = 5               // distinct label sets per tenant
	wishes    = 12              // distinct prefixes that nodes request at a time, close to the next free ones
	ownNumber = 1 << 20         // number of the first machine of the clients' own nodes
)

func machine(name, rival int) string { return storetest.UUID(name*rivals + rival) }

type clients struct {
	work
	token   string
	began   time.Time
	changed atomic.Int64 // calls that changed something and got a response
	ending  atomic.Bool
}

type client struct {
	*clients
	number int
	random *rand.Rand
	log    *json.Encoder
	people []pilasterv1connect.OperatorServiceClient // operator clients, by place
	nodes  []*join.Client                            // clients of the client's own node, by place
}

func beClients(text string) error {
	c := &clients{began: time.Now()}
	if err := json.Unmarshal([]byte(text), &c.work); err != nil {
		return err
	}
	token, err := os.ReadFile(c.Places[0].TokenFile)
	if err != nil {
		return err
	}
	c.token = string(token)
	go func() {
		io.Copy(io.Discard, os.Stdin)
		c.ending.Store(true)
	}()
	var all sync.WaitGroup
	failed := make(chan error, c.Clients)
	for i := range c.Clients {
		all.Go(func() { failed <- c.run(i) })
	}
	ended := make(chan struct{})
	go func() { all.Wait(); close(ended) }()
	progress := time.NewTicker(5 * time.Second)
	defer progress.Stop()
	for {
		select {
		case <-progress.C:
			fmt.Println(c.changed.Load())
		case err := <-failed:
			if err != nil {
				return err
			}
		case <-ended:
			return nil
		}
	}
}

func logFile(dir string, client int) string {
	return filepath.Join(dir, fmt.Sprintf("client-%d.json", client))
}

func (all *clients) run(number int) error {
	f, err := os.Create(logFile(all.Dir, number))
	if err != nil {
		return err
	}
	defer f.Close()
	buffer := bufio.NewWriter(f)
	c := &client{clients: all, number: number, random: rand.New(rand.NewPCG(all.Seed, uint64(number))),
		log: json.NewEncoder(buffer)}
	for _, p := range c.Places {
		c.people = append(c.people,
			pilasterv1connect.NewOperatorServiceClient(unixrpc.Client(orchestrator.Socket(p.RunDir)), unixrpc.URL))
	}
	c.settle()
	for !c.ending.Load() || c.changed.Load() < c.Changes {
		c.step()
	}
	return buffer.Flush()
}

// settle registers the client's own node, for calls that only nodes may make.
func (c *client) settle() {
	for c.nodes == nil {
		c.nodes = c.join(fmt.Sprintf("own%d", c.number), ownNumber+c.number, 0, c.random.IntN(len(c.Places)), "")
	}
}

// step makes one call, and sometimes repeats a call without a response.
func (c *client) step() {
	base := int(c.changed.Load() / perName)
	n, place := base+c.random.IntN(window), c.random.IntN(len(c.Places))
	var ask func(place int) string
	switch dice := c.random.IntN(100); {
	case dice < 25:
		rival, wanted := c.random.IntN(rivals), ""
		if c.random.IntN(5) == 0 { // a prefix that other clients request too
			wanted = address.DefaultPlan().Node(uint64(1 + base*wishes + c.random.IntN(2*wishes))).String()
		}
		ask = func(place int) string {
			e, nodes := c.register(fmt.Sprint("n", n), n, rival, place, wanted)
			closeAll(nodes)
			return e.Outcome
		}
	case dice < 33:
		ask = func(place int) string { return c.operate(remove, fmt.Sprint("n", n), place).Outcome }
	case dice < 50:
		ask = func(place int) string { return c.operate(create, fmt.Sprint("t", n), place).Outcome }
	case dice < 67:
		ask = func(place int) string { return c.operate(destroy, fmt.Sprint("t", n), place).Outcome }
	case dice < 70:
		ask = func(place int) string { return c.operate(create, fmt.Sprint("k", n), place).Outcome }
	case dice < 76:
		ask = func(place int) string { return c.operate(rotate, fmt.Sprint("k", n), place).Outcome }
	case dice < 84: // policies that are applied together have the same value
		do, value := []string{create, rule, rule, rule, unrule, destroy}[c.random.IntN(6)], ""
		if do == rule {
			value = fmt.Sprint(c.random.IntN(values))
		}
		ask = func(place int) string { return c.operateOn(do, fmt.Sprint("r", n), value, place).Outcome }
	case dice < 92: // all publications are on one node's gateway
		do := []string{create, publish, publish, withdraw, destroy}[c.random.IntN(5)]
		ask = func(place int) string { return c.operate(do, fmt.Sprint("p", n), place).Outcome }
	default: // resolve labels only in tenants with odd numbers: afterwards they cannot be deleted
		label := fmt.Sprint(c.random.IntN(labels))
		ask = func(place int) string { return c.resolve(fmt.Sprint("t", n|1), label, place).Outcome }
	}
	if ask(place) == unknown && c.random.IntN(2) == 0 {
		ask((place + 1) % len(c.Places))
	}
}

func closeAll(nodes []*join.Client) {
	for _, n := range nodes {
		n.Close()
	}
}

// record makes one call and logs its result.
func (c *client) record(e entry, call func(ctx context.Context, e *entry) error) entry {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	e.Client, e.Asked = c.number, time.Since(c.began)
	err := call(ctx, &e)
	e.Answered = time.Since(c.began)
	e.Outcome = outcome(err)
	if err != nil {
		e.Code, e.Error = connect.CodeOf(err).String(), err.Error()
	} else if e.Ask != resolve {
		c.changed.Add(1)
	}
	if err := c.log.Encode(e); err != nil {
		panic(err) // without a log, the test cannot check anything
	}
	if e.Outcome == unknown {
		time.Sleep(20 * time.Millisecond) // the delay of a retry
	}
	return e
}

// outcome returns refused only for errors with which an orchestrator refuses a call.
func outcome(err error) string {
	if err == nil {
		return done
	}
	switch connect.CodeOf(err) {
	case connect.CodeNotFound, connect.CodeAlreadyExists, connect.CodeFailedPrecondition,
		connect.CodeResourceExhausted, connect.CodeInvalidArgument:
		return refused
	}
	return unknown
}

func (c *client) join(name string, number, rival, place int, wanted string) []*join.Client {
	_, nodes := c.register(name, number, rival, place, wanted)
	return nodes
}

// register joins and registers as a machine. Each client has its own state folder for each machine, so two clients that
// act as one machine simulate a copied disk. It also returns a client for each place.
func (c *client) register(name string, number, rival, place int, wanted string) (entry, []*join.Client) {
	id := machine(number, rival)
	config := func(place int) join.Config {
		return join.Config{URL: c.Places[place].URL, Token: c.token, NodeName: name, NodeUUID: id,
			StateDir: filepath.Join(c.Dir, fmt.Sprint(c.number), id), Log: slog.New(slog.DiscardHandler)}
	}
	if err := os.MkdirAll(config(place).StateDir, 0o700); err != nil {
		panic(err)
	}
	var nodes []*join.Client
	e := c.record(entry{Ask: register, Name: name, Of: rival, Wanted: wanted, Place: place},
		func(ctx context.Context, e *entry) error {
			node, err := join.Dial(ctx, config(place))
			if err != nil {
				return err
			}
			defer node.Close()
			resp, err := node.Register(ctx,
				connect.NewRequest(&pilasterv1.RegisterRequest{WantedPrefix: wanted, Version: "chaos", Gateway: true,
					Enforces: []string{"netpila", "nimitz"}}))
			if err != nil {
				return err
			}
			e.Prefix = resp.Msg.Node.Prefix
			if _, err := netip.ParsePrefix(e.Prefix); err != nil || resp.Msg.Node.Name != name ||
				resp.Msg.Node.Uuid != id {
				panic(fmt.Sprintf("registered as %s %s, but got a response for %v", name, id, resp.Msg.Node))
			}
			return nil
		})
	if e.Outcome != done {
		return e, nil
	}
	for i := range c.Places {
		node, err := join.Dial(context.Background(), config(i)) // makes no call: the certificate exists
		if err != nil {
			panic(err)
		}
		nodes = append(nodes, node)
	}
	return e, nodes
}

func (c *client) resolve(name, label string, place int) entry {
	return c.record(entry{Ask: resolve, Name: name, Label: label, Place: place},
		func(ctx context.Context, e *entry) error {
			resp, err := c.nodes[place].Resolve(ctx,
				connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: name, Labels: map[string]string{"app": label}}))
			if err == nil {
				ids := resp.Msg.Tenant.Ids
				e.ID, e.App = ids[len(ids)-1].Id, resp.Msg.App.Id
			}
			return err
		})
}

// operate makes an operator's call.
func (c *client) operate(ask, name string, place int) entry {
	return c.operateOn(ask, name, "", place)
}

func (c *client) operateOn(ask, name, label string, place int) entry {
	people := c.people[place]
	return c.record(entry{Ask: ask, Name: name, Label: label, Place: place}, func(ctx context.Context, e *entry) error {
		var err error
		switch ask {
		case create:
			var resp *connect.Response[pilasterv1.CreateTenantResponse]
			req := &pilasterv1.CreateTenantRequest{Name: name}
			if name[0] == 'p' {
				req.Network, req.Overlays = "nimitz", []*pilasterv1.Overlay{{Cidr: "fd12:3456::/48"}}
			}
			if resp, err = people.CreateTenant(ctx, connect.NewRequest(req)); err == nil {
				e.ID = resp.Msg.Tenant.Ids[0].Id
			}
		case destroy:
			_, err = people.DeleteTenant(ctx, connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: name}))
		case rotate:
			var resp *connect.Response[pilasterv1.RotateKeyResponse]
			if resp, err = people.RotateKey(ctx,
				connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: name})); err == nil {
				e.ID = resp.Msg.Id
			}
		case publish:
			var resp *connect.Response[pilasterv1.CreatePublicationResponse]
			wanted := &pilasterv1.Publication{Tenant: name, Name: "web", Container: "fd12:3456::5", Node: "own0"}
			if resp, err = people.CreatePublication(ctx,
				connect.NewRequest(&pilasterv1.CreatePublicationRequest{Publication: wanted})); err == nil {
				e.Underlay = resp.Msg.Publication.Underlay
			}
		case withdraw:
			_, err = people.DeletePublication(ctx,
				connect.NewRequest(&pilasterv1.DeletePublicationRequest{Tenant: name, Name: "web"}))
		case rule:
			var resp *connect.Response[pilasterv1.ApplyPoliciesResponse]
			if resp, err = people.ApplyPolicies(ctx,
				connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: name,
					Documents: ruledBy(label)})); err == nil {
				e.Change = changesOf(resp.Msg.Policies)
			}
		case unrule:
			_, err = people.DeletePolicies(ctx,
				connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: name, Documents: ruledBy("")}))
		case remove:
			_, err = people.DeleteNode(ctx, connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: name}))
		}
		return err
	})
}
