// Renders deploy/chart with Go's own text/template, which Helm is built on, and the few functions of Sprig and Helm
// that the chart uses: for machines without Helm.
//
//	go run tools/chart/render.go deploy/chart NAME < values.json > manifests.yaml
//
// values.json: the chart's values, whole. A function that is not here stops it with an error.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"text/template"
)

func number(value any) int {
	switch value := value.(type) {
	case int:
		return value
	case float64:
		return int(value)
	}
	panic(fmt.Sprintf("%v is no number", value))
}

func quoted(value any) string {
	if number, isNumber := value.(float64); isNumber {
		value = strconv.FormatFloat(number, 'f', -1, 64)
	}
	return strconv.Quote(fmt.Sprint(value))
}

func toYaml(value any) string {
	values, isMap := value.(map[string]any)
	if !isMap {
		return quoted(value)
	}
	lines := []string{}
	for name, value := range values {
		lines = append(lines, name+": "+toYaml(value))
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func dict(pairs ...any) map[string]any {
	made := map[string]any{}
	for place := 0; place < len(pairs); place += 2 {
		made[pairs[place].(string)] = pairs[place+1]
	}
	return made
}

func merge(into map[string]any, others ...map[string]any) map[string]any {
	for _, other := range others {
		for name, value := range other {
			if _, isThere := into[name]; !isThere {
				into[name] = value
			}
		}
	}
	return into
}

func main() {
	if err := render(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render(chart, name string) error {
	var values map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&values); err != nil {
		return err
	}
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"add":       func(a, b any) int { return number(a) + number(b) },
		"mul":       func(a, b any) int { return number(a) * number(b) },
		"div":       func(a, b any) int { return number(a) / number(b) },
		"max":       func(a, b any) int { return max(number(a), number(b)) },
		"int":       number,
		"quote":     quoted,
		"toYaml":    toYaml,
		"dict":      dict,
		"merge":     merge,
		"splitList": func(separator, text string) []string { return strings.Split(text, separator) },
		"fail":      func(why string) (string, error) { return "", fmt.Errorf("the chart refuses: %s", why) },
		"default": func(otherwise, value any) any {
			if value == nil || value == "" {
				return otherwise
			}
			return value
		},
		"nindent": func(spaces int, text string) string {
			return "\n" + strings.Repeat(" ", spaces) + strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", spaces))
		},
		"include": func(name string, with any) (string, error) {
			var text bytes.Buffer
			err := all.ExecuteTemplate(&text, name, with)
			return text.String(), err
		},
	})
	if _, err := all.ParseGlob(filepath.Join(chart, "templates", "*")); err != nil {
		return err
	}
	root := map[string]any{"Values": values, "Release": map[string]any{"Name": name}}
	return all.ExecuteTemplate(os.Stdout, "server.yaml", root)
}
