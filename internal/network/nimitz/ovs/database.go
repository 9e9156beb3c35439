package ovs

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/ovn-kubernetes/libovsdb/client"
	"github.com/ovn-kubernetes/libovsdb/model"
	"github.com/ovn-kubernetes/libovsdb/ovsdb"
)

// OVSDB's tables.
const (
	tableRoot      = "Open_vSwitch"
	tableBridge    = "Bridge"
	tablePort      = "Port"
	tableInterface = "Interface"
)

// owner is the key of external_ids that marks rows as ours, and names their port.
const owner = "pilaster"

// database is a connection to OVSDB, the configuration of Open vSwitch.
type database struct{ client client.Client }

func openDatabase(ctx context.Context, runDir string) (*database, error) {
	schema, err := model.NewClientDBModel(tableRoot, nil)
	if err != nil {
		return nil, err
	}
	c, err := client.NewOVSDBClient(schema, client.WithEndpoint("unix:"+filepath.Join(runDir, "db.sock")))
	if err != nil {
		return nil, err
	}
	if err := c.Connect(ctx); err != nil {
		return nil, fmt.Errorf("ovsdb: %w; is Open vSwitch running with --ovs-run-dir %s?", err, runDir)
	}
	return &database{c}, nil
}

func (d *database) close() { d.client.Close() }

func (d *database) transact(ctx context.Context, ops ...ovsdb.Operation) ([]ovsdb.OperationResult, error) {
	results, err := d.client.Transact(ctx, ops...)
	if err != nil {
		return nil, fmt.Errorf("ovsdb: %w", err)
	}
	if failed, err := ovsdb.CheckOperationResults(results, ops); err != nil {
		all := []error{fmt.Errorf("ovsdb: nothing was changed: %w", err)}
		for _, f := range failed {
			all = append(all, f)
		}
		return nil, errors.Join(all...)
	}
	return results, nil
}

func (d *database) read(
	ctx context.Context,
	table string,
	where []ovsdb.Condition,
	columns ...string,
) ([]ovsdb.Row, error) {
	results, err := d.transact(
		ctx,
		ovsdb.Operation{Op: ovsdb.OperationSelect, Table: table, Where: where, Columns: append(columns, "_uuid")},
	)
	if err != nil {
		return nil, err
	}
	return results[0].Rows, nil
}

// root returns the only row of the table Open_vSwitch. A new database has none.
func (d *database) root(ctx context.Context) (ovsdb.Row, error) {
	for {
		rows, err := d.read(ctx, tableRoot, nil, "next_cfg", "cur_cfg")
		if err != nil || len(rows) == 1 {
			return append(rows, nil)[0], err
		}
		if _, err := d.transact(ctx,
			ovsdb.Operation{Op: ovsdb.OperationInsert, Table: tableRoot,
				Row: ovsdb.Row{"system_type": "pilaster"}}); err != nil {
			return nil, err
		}
	}
}

// change applies all operations or none, and waits until ovs-vswitchd has applied the new configuration.
func (d *database) change(ctx context.Context, ops ...ovsdb.Operation) error {
	root, err := d.root(ctx)
	if err != nil {
		return err
	}
	is := []ovsdb.Condition{where("_uuid", root["_uuid"])}
	ops = append(
		ops,
		ovsdb.Operation{
			Op:        ovsdb.OperationMutate,
			Table:     tableRoot,
			Where:     is,
			Mutations: []ovsdb.Mutation{{Column: "next_cfg", Mutator: ovsdb.MutateOperationAdd, Value: 1}},
		},
		ovsdb.Operation{
			Op:      ovsdb.OperationSelect,
			Table:   tableRoot,
			Where:   is,
			Columns: []string{"next_cfg", "cur_cfg"},
		},
	)
	results, err := d.transact(ctx, ops...)
	if err != nil {
		return err
	}
	row := results[len(ops)-1].Rows[0]
	for want := number(row["next_cfg"]); number(row["cur_cfg"]) < want; {
		// The wait returns when the number differs from the one that was read.
		results, err := d.transact(
			ctx,
			ovsdb.Operation{
				Op:      ovsdb.OperationWait,
				Table:   tableRoot,
				Where:   is,
				Columns: []string{"cur_cfg"},
				Until:   "!=",
				Rows:    []ovsdb.Row{{"cur_cfg": row["cur_cfg"]}},
			},
			ovsdb.Operation{Op: ovsdb.OperationSelect, Table: tableRoot, Where: is, Columns: []string{"cur_cfg"}},
		)
		if err != nil {
			return fmt.Errorf("the configuration is written, but ovs-vswitchd has not taken it: %w", err)
		}
		row = results[1].Rows[0]
	}
	return nil
}

func number(v any) int {
	switch n := v.(type) {
	case int:
		return n
	case float64:
		return int(n)
	}
	return 0
}

func where(column string, value any) ovsdb.Condition {
	return ovsdb.NewCondition(column, ovsdb.ConditionEqual, value)
}

// ids returns the external_ids of rows that are ours.
func ids(of string) ovsdb.OvsMap { return ovsdb.OvsMap{GoMap: map[any]any{owner: of}} }

func options(of map[string]string) ovsdb.OvsMap {
	m := ovsdb.OvsMap{GoMap: map[any]any{}}
	for k, v := range of {
		m.GoMap[k] = v
	}
	return m
}

// device is a port of a bridge.
type device struct {
	name    string
	of      string // the port's owner, in external_ids
	kind    string // the type of the interface; "" is an existing network device
	ofport  uint32 // 0: any
	options map[string]string
}

// addPort adds a port to a bridge.
func addPort(bridge ovsdb.Condition, p device) []ovsdb.Operation {
	row := ovsdb.Row{"name": p.name, "type": p.kind, "external_ids": ids(p.of), "options": options(p.options)}
	if p.ofport != 0 {
		row["ofport_request"] = int(p.ofport)
	}
	port := "p" + hexName(p.name)
	return append(portRows(p, port, row), ovsdb.Operation{
		Op: ovsdb.OperationMutate, Table: tableBridge, Where: []ovsdb.Condition{bridge},
		Mutations: []ovsdb.Mutation{{Column: "ports", Mutator: ovsdb.MutateOperationInsert, Value: one(port)}},
	})
}

func portRows(p device, port string, row ovsdb.Row) []ovsdb.Operation {
	return []ovsdb.Operation{
		{Op: ovsdb.OperationInsert, Table: tableInterface, UUIDName: "i" + port, Row: row},
		{
			Op:       ovsdb.OperationInsert,
			Table:    tablePort,
			UUIDName: port,
			Row:      ovsdb.Row{"name": p.name, "interfaces": one("i" + port), "external_ids": ids(p.of)},
		},
	}
}

// hexName turns a name into one that OVSDB accepts for a new row.
func hexName(s string) string { return fmt.Sprintf("%x", s) }

func one(uuid string) ovsdb.OvsSet {
	return ovsdb.OvsSet{GoSet: []any{ovsdb.UUID{GoUUID: uuid}}}
}

// ensureBridge creates a bridge with these ports, unless a bridge of the name exists.
func (d *database) ensureBridge(
	ctx context.Context,
	name string,
	datapath Datapath,
	config map[string]string,
	ports ...device,
) error {
	rows, err := d.read(ctx, tableBridge, []ovsdb.Condition{where("name", name)}, "external_ids")
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		if ownerOf(rows[0]) == "" {
			return fmt.Errorf("bridge %s is not ours; it was not changed: rename or remove it", name)
		}
		return nil
	}
	root, err := d.root(ctx)
	if err != nil {
		return err
	}
	own := device{name: name, kind: "internal", of: name}
	ops := portRows(own, "p", ovsdb.Row{"name": name, "type": own.kind, "external_ids": ids(name)})
	all := ovsdb.OvsSet{GoSet: []any{ovsdb.UUID{GoUUID: "p"}}}
	for _, p := range ports {
		named := "p" + hexName(p.name)
		ops = append(ops, addPort(ovsdb.Condition{}, p)[:2]...)
		all.GoSet = append(all.GoSet, ovsdb.UUID{GoUUID: named})
	}
	ops = append(
		ops,
		ovsdb.Operation{Op: ovsdb.OperationInsert, Table: tableBridge, UUIDName: "b", Row: ovsdb.Row{
			"name": name, "ports": all, "datapath_type": string(datapath), "fail_mode": "secure",
			"other_config": options(config), "external_ids": ids(name),
			"protocols": ovsdb.OvsSet{GoSet: []any{"OpenFlow14"}},
		}},
		ovsdb.Operation{
			Op:        ovsdb.OperationMutate,
			Table:     tableRoot,
			Where:     []ovsdb.Condition{where("_uuid", root["_uuid"])},
			Mutations: []ovsdb.Mutation{{Column: "bridges", Mutator: ovsdb.MutateOperationInsert, Value: one("b")}},
		},
	)
	return d.change(ctx, ops...)
}

// removeBridges removes the bridges that are ours, with their ports.
func (d *database) removeBridges(ctx context.Context, names ...string) error {
	root, err := d.root(ctx)
	if err != nil {
		return err
	}
	gone := ovsdb.OvsSet{}
	for _, name := range names {
		rows, err := d.read(ctx, tableBridge, []ovsdb.Condition{where("name", name)}, "external_ids")
		if err != nil {
			return err
		}
		if len(rows) > 0 && ownerOf(rows[0]) != "" {
			gone.GoSet = append(gone.GoSet, rows[0]["_uuid"])
		}
	}
	if len(gone.GoSet) == 0 {
		return nil
	}
	return d.change(
		ctx,
		ovsdb.Operation{
			Op:        ovsdb.OperationMutate,
			Table:     tableRoot,
			Where:     []ovsdb.Condition{where("_uuid", root["_uuid"])},
			Mutations: []ovsdb.Mutation{{Column: "bridges", Mutator: ovsdb.MutateOperationDelete, Value: gone}},
		},
	)
}

// removePort removes a port of the switch.
func (d *database) removePort(ctx context.Context, name string) error {
	rows, err := d.read(ctx, tablePort, []ovsdb.Condition{where("name", name)}, "external_ids")
	if err != nil || len(rows) == 0 {
		return err
	}
	return d.change(
		ctx,
		ovsdb.Operation{
			Op:    ovsdb.OperationMutate,
			Table: tableBridge,
			Where: []ovsdb.Condition{where("name", bridgeName)},
			Mutations: []ovsdb.Mutation{
				{
					Column:  "ports",
					Mutator: ovsdb.MutateOperationDelete,
					Value:   ovsdb.OvsSet{GoSet: []any{rows[0]["_uuid"]}},
				},
			},
		},
	)
}

func ownerOf(row ovsdb.Row) string {
	if m, ok := row["external_ids"].(ovsdb.OvsMap); ok {
		of, _ := m.GoMap[owner].(string)
		return of
	}
	return ""
}

// interfaces returns our interfaces that fulfil the conditions, by device: the port's owner, its number and its error.
func (d *database) interfaces(ctx context.Context, which ...ovsdb.Condition) (map[string]state, error) {
	rows, err := d.read(ctx, tableInterface, which, "name", "ofport", "error", "external_ids")
	if err != nil {
		return nil, err
	}
	all := map[string]state{}
	for _, row := range rows {
		if of := ownerOf(row); of != "" {
			wrong, _ := row["error"].(string)
			all[row["name"].(string)] = state{of, number(row["ofport"]), wrong}
		}
	}
	return all, nil
}

// state is the state of an interface.
type state struct {
	of     string
	ofport int // -1 if Open vSwitch could not open it
	wrong  string
}
