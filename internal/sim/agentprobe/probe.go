package agentprobe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/unixrpc"
)

// probe runs the real agent in the simulated cluster.
type probe struct {
	Options
	line   *Line
	report func(string)
	began  time.Time
	lab    *lab.Lab // nil until it is up
	agent  *http.Client
	before metrics
	warm   chan struct{} // closed when the warm-up is over
}

// node is the name of the agent's node.
const node = "agent"

// Join starts the agent and its containers.
func (g *probe) Join(ctx context.Context, c sim.Cluster) (err error) {
	spec := lab.Spec{Name: g.Name, Nodes: []string{node}}
	var arguments []string
	if of, _ := modules.Of(g.line.Network); of.AgentArguments != nil {
		// Each simulated node has a subnet of the tenant; the agent's own containers have one entry each.
		arguments = of.AgentArguments(2 * (g.Sizes[len(g.Sizes)-1] + 2*g.Containers))
	}
	g.report(humanize.Of(g.Containers, "container", "containers") + " of a real agent")
	g.lab, err = lab.Up(ctx, spec, lab.Options{
		Binary: g.Binary, AgentArgs: arguments,
		External: &lab.ExternalOrchestrator{Serve: c.Orchestrator.ServeNodes, Socket: c.Socket, Token: c.Token},
	})
	if err != nil {
		return err
	}
	g.agent = unixrpc.Client(g.lab.AgentSocket(node))
	for i := range g.Containers {
		if err := g.lab.AddContainer(ctx, lab.Container{Name: fmt.Sprintf("c%d", i+1), Node: node,
			Tenant: c.Tenants[i%len(c.Tenants)], Labels: c.Labels}); err != nil {
			return err
		}
	}
	time.AfterFunc(g.WarmUp, func() { close(g.warm) })
	g.before, err = g.quiet(ctx)
	return err
}

// downTime bounds the removal of the agent and its containers, also after an interrupt.
const downTime = time.Minute

// leave removes the agent while the orchestrator still runs.
func (g *probe) leave(ctx context.Context) error {
	if g.lab == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTime)
	defer cancel()
	return g.lab.Down(ctx)
}

// After measures the agent. The first call waits for the agent's warm-up.
func (g *probe) After(ctx context.Context, s sim.Stage) error {
	select {
	case <-g.warm:
	case <-ctx.Done():
		return ctx.Err()
	}
	now, err := g.quiet(ctx)
	if err != nil {
		return err
	}
	p := Point{Nodes: s.Nodes, Containers: s.Containers, Simulation: s.Resident, Seconds: time.Since(g.began).Seconds()}
	p.Received, p.Heartbeats = since(now.received, g.before.received), since(now.heartbeats, g.before.heartbeats)
	p.Entries, g.before = now.entries, now
	if err := g.get(ctx, "/debug/memory",
		func(body io.Reader) error { return json.NewDecoder(body).Decode(&p.Memory) }); err != nil {
		return err
	}
	if err := g.same(ctx); err != nil {
		return err
	}
	g.line.Points = append(g.line.Points, p)
	g.report(p.String())
	return nil
}

// same checks that all measurements are of the same process.
func (g *probe) same(ctx context.Context) error {
	all, err := g.lab.Processes(ctx)
	if err != nil {
		return err
	}
	for _, p := range all {
		if p.Name == lab.AgentProcess(node) && p.Restarts > 0 {
			return fmt.Errorf(
				"the agent exited (%s) and was restarted; its log is %s/log/%s.log while the lab is up",
				p.LastExit,
				g.lab.Folder(),
				p.Name,
			)
		}
	}
	return nil
}

// metrics holds the agent's metrics.
type metrics struct {
	received, heartbeats sim.Count      // since the agent's start
	entries              map[string]int // by table
	connected            bool
}

func (s metrics) equal(o metrics) bool {
	return s.received == o.received && s.connected == o.connected && maps.Equal(s.entries, o.entries)
}

// Two equal readings of the metrics mean that the agent has applied all updates.
const (
	lookEvery  = 300 * time.Millisecond
	settleTime = time.Minute
)

// quiet waits until the agent has applied all updates.
func (g *probe) quiet(ctx context.Context) (metrics, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, settleTime, errors.New("the agent's metrics do not settle"))
	defer cancel()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	last, err := g.ask(ctx)
	for err == nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return last, context.Cause(ctx)
		}
		var now metrics
		if now, err = g.ask(ctx); err == nil && now.connected && now.equal(last) {
			return now, nil
		}
		last = now
	}
	return last, err
}

// ask reads the agent's metrics.
func (g *probe) ask(ctx context.Context) (s metrics, err error) {
	return s, g.get(ctx, "/metrics", func(body io.Reader) (err error) {
		s, err = parse(body)
		return err
	})
}

func (g *probe) get(ctx context.Context, path string, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, unixrpc.URL+path, nil)
	if err != nil {
		return err
	}
	resp, err := g.agent.Do(req)
	if err != nil {
		return fmt.Errorf("read %s from the agent: %w", path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("read %s from the agent: %s: %s", path, resp.Status, strings.TrimSpace(string(text)))
	}
	return read(resp.Body)
}

// ownCounts are the labels of table metrics that are not tables of the packet path: they exist because they limit ADDs.
var ownCounts = map[string]bool{"endpoints": true, "tenant-ids": true}

// parse reads the needed metrics from Prometheus text.
func parse(page io.Reader) (s metrics, err error) {
	s.entries = map[string]int{}
	lines := bufio.NewScanner(page)
	for lines.Scan() {
		line := lines.Text()
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || line[0] == '#' {
			continue
		}
		name, labels, _ := strings.Cut(line[:at], "{")
		if !strings.HasPrefix(name, "pilaster_") {
			continue
		}
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			return s, fmt.Errorf("unexpected line in the agent's metrics: %q", line)
		}
		to := &s.received
		if strings.Contains(labels, `event="heartbeat"`) {
			to = &s.heartbeats
		}
		switch name {
		case "pilaster_agent_received_messages_total":
			to.Messages += int64(v)
		case "pilaster_agent_received_message_bytes_total":
			to.Bytes += int64(v)
		case "pilaster_orchestrator_connected":
			s.connected = v == 1
		case "pilaster_table_entries":
			table := strings.TrimSuffix(strings.TrimPrefix(labels, `table="`), `"}`)
			if !ownCounts[table] {
				s.entries[table] = int(v)
			}
		}
	}
	return s, lines.Err()
}
