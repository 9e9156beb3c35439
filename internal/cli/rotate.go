package cli

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// States of a tenant's id.
const (
	idCurrent  = "current"  // new containers get addresses with this id
	idAccepted = "accepted" // becomes current when all nodes that host the tenant accept packets with this id
	idRetiring = "retiring" // until its last container is deleted
)

// tenantIDView is an id as JSON. In tenant get and rotate-key it has the nodes that hold or lack the id.
type tenantIDView struct {
	ID      uint32   `json:"id"`
	State   string   `json:"state"`
	HeldBy  []string `json:"heldBy,omitzero"`  // nodes that have containers with this id or use it for new containers
	Lacking []string `json:"lacking,omitzero"` // nodes that host the tenant and do not yet accept this id, or do not yet use it
	Key     string   `json:"key,omitempty"`    // hexadecimal; with --show-key
}

// hostView is a node that hosts a tenant.
type hostView struct {
	Name      string `json:"name"`
	Connected bool   `json:"connected"`
}

func viewIDs(ids []*pilasterv1.TenantId) []tenantIDView {
	var views []tenantIDView
	state := idRetiring
	for i, id := range ids {
		if id.OnlyAccepted {
			state = idAccepted
		} else if i == len(ids)-1 || ids[i+1].OnlyAccepted {
			state = idCurrent
		}
		views = append(views, tenantIDView{ID: id.Id, State: state, Key: hex.EncodeToString(id.Key)})
	}
	return views
}

// viewHosted returns a tenant with the reports of the nodes that host it.
func viewHosted(r *pilasterv1.GetTenantResponse) tenantView {
	v := viewTenant(r.Tenant)
	v.Apps, v.Nodes = []appView{}, []hostView{}
	v.Leaving, v.AppNumbers, v.Unenforced = viewLeaving(
		r.Tenant,
		r.Hosting,
	), viewAppNumbers(
		r,
	), viewUnenforced(
		r.Hosting,
	)
	for _, a := range r.Apps {
		v.Apps = append(v.Apps, appView{a.Id, a.Labels})
	}
	for _, h := range r.Hosting {
		v.Nodes = append(v.Nodes, hostView{h.Node, h.Connected})
	}
	for i := range v.IDs {
		id := &v.IDs[i]
		id.HeldBy, id.Lacking = []string{}, []string{}
		for _, h := range r.Hosting {
			if len(h.Holds) == 0 || slices.Contains(h.Holds, id.ID) {
				id.HeldBy = append(id.HeldBy, h.Node)
			}
			if id.State == idAccepted && !slices.Contains(h.Accepts, id.ID) ||
				id.State == idCurrent && !slices.Contains(h.Holds, id.ID) {
				id.Lacking = append(id.Lacking, h.Node)
			}
		}
	}
	return v
}

func (v tenantIDView) describe() string {
	words := v.State
	switch {
	case v.State == idAccepted && len(v.Lacking) > 0:
		words += ", not yet by " + strings.Join(v.Lacking, ", ")
	case v.State != idAccepted && len(v.HeldBy) > 0:
		words += ", held by " + strings.Join(v.HeldBy, ", ")
	}
	if v.State == idCurrent && len(v.Lacking) > 0 {
		words += "; not yet used for new containers by " + strings.Join(v.Lacking, ", ")
	}
	if v.Key != "" {
		words += ", key " + v.Key
	}
	return words
}

func describeNodes(nodes []hostView) string {
	var words []string
	for _, n := range nodes {
		if n.Connected {
			words = append(words, n.Name)
		} else {
			words = append(words, n.Name+" (away)")
		}
	}
	return strings.Join(words, ", ")
}

func newTenantRotateKey(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	wait := 30 * time.Second
	var force bool
	cmd := &cobra.Command{
		Use:   "rotate-key NAME",
		Short: "Give a tenant a new id with a new key for new containers",
		Long: `Give a tenant a new id with a new key for new containers.

First, all nodes that host the tenant accept the new id. Then new containers get addresses of the new
id. Existing containers keep id, key and address, and communicate with new ones. The old id and its key
are retired when the last container that uses them is deleted.

A disconnected node accepts the id when it reconnects. Until then, new containers get addresses of the
old id. The command can be repeated: it continues the rotation in progress.`,
		Example: "  pilaster tenant rotate-key blue\n  pilaster tenant rotate-key blue --wait 5m --force",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			v, err := rotateKey(cmd.Context(), socket.client(), args[0], wait, force)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(w, "tenant %s: new containers get addresses of id %d\n", v.Name, v.IDs[len(v.IDs)-1].ID)
				for _, id := range v.IDs {
					fmt.Fprintf(w, "id\t%d\t%s\n", id.ID, id.describe())
				}
			})
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	out.bind(cmd)
	cmd.Flags().Var((*atMost)(&wait), "wait", "how long to wait for the nodes to accept the new id")
	cmd.Flags().
		BoolVar(&force, "force", false, "after the wait, use the id although some nodes have not accepted it; they "+
			"cannot communicate with new containers until they reconnect")
	return cmd
}

// rotateKey returns the tenant when all nodes use the new id for new containers. After the wait, it is enough that
// nodes may use the id; if they may not, rotateKey fails, or makes the orchestrator permit it if force is true.
func rotateKey(
	ctx context.Context,
	client pilasterv1connect.OperatorServiceClient,
	name string,
	wait time.Duration,
	force bool,
) (tenantView, error) {
	made, err := client.RotateKey(ctx, connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: name}))
	if err != nil {
		return tenantView{}, err
	}
	id := made.Msg.Id
	for end := time.Now().Add(wait); ; {
		got, err := client.GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
		if err != nil {
			return tenantView{}, fmt.Errorf(
				"%w\n  id %d of tenant %s was created and the rotation continues; `pilaster tenant get %s` shows the "+
					"progress",
				err,
				id,
				name,
				name,
			)
		}
		v := viewHosted(got.Msg)
		i := slices.IndexFunc(v.IDs, func(has tenantIDView) bool { return has.ID == id })
		late := time.Now().After(end)
		switch {
		case i < 0: // another rotation has replaced the id
			return v, nil
		case v.IDs[i].State != idAccepted && (late || len(v.IDs[i].Lacking) == 0):
			return v, nil // a disconnected node uses the previous id until it reconnects
		case late:
			if !force {
				return v, fmt.Errorf(
					"id %d of tenant %s is not yet accepted by %s; until then, new containers get addresses of the "+
						"previous id\n  nothing is lost: reconnect the nodes, delete them if they no longer exist, "+
						"or repeat the command; --force does not wait for them",
					id,
					name,
					strings.Join(v.IDs[i].Lacking, ", "),
				)
			}
			if _, err := client.RotateKey(ctx,
				connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: name, Force: id})); err != nil {
				return v, err
			}
			continue
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
}
