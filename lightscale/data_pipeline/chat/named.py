"""Chat templates by name, with ``{% generation %}`` around what the assistant generates, its end marker included.

chatml   <|im_start|>ROLE, a line each: the form of ChatML
llama3   <|start_header_id|>ROLE<|end_header_id|>: the form of Llama 3
qwen     ChatML with tools in the system message, as Qwen 2.5 has them
"""

_CHATML = """\
{%- for message in messages -%}
    {{- "<|im_start|>" ~ message.role ~ "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
            {{- (message.content or "") ~ "<|im_end|>" -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- (message.content or "") ~ "<|im_end|>" -}}
    {%- endif -%}
    {{- "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""

_LLAMA3 = """\
{{- bos_token | default("<|begin_of_text|>") -}}
{%- if tools -%}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\nTools:" -}}
    {%- for tool in tools -%}
        {{- "\\n" ~ (tool | tojson) -}}
    {%- endfor -%}
    {{- "<|eot_id|>" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = "ipython" if message.role == "tool" else message.role -%}
    {{- "<|start_header_id|>" ~ role ~ "<|end_header_id|>\\n\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
            {{- (message.content or "") | trim -}}
            {%- for call in message.tool_calls or [] -%}
                {%- set function = call.function or call -%}
                {{- {"name": function.name, "parameters": function.arguments} | tojson -}}
            {%- endfor -%}
            {{- "<|eot_id|>" -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- (message.content or "") | trim ~ "<|eot_id|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" -}}
{%- endif -%}
"""

_QWEN = """\
{%- set first = messages[0] -%}
{%- if tools -%}
    {{- "<|im_start|>system\\n" -}}
    {%- if first.role == "system" -%}
        {{- first.content ~ "\\n\\n" -}}
    {%- endif -%}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" -}}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" -}}
    {%- for tool in tools -%}
        {{- "\\n" ~ (tool | tojson) -}}
    {%- endfor -%}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within " -}}
    {{- "<tool_call></tool_call> XML tags:\\n<tool_call>\\n" -}}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif first.role == "system" -%}
    {{- "<|im_start|>system\\n" ~ first.content ~ "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == "tool" -%}
        {%- if loop.first or loop.previtem.role != "tool" -%}
            {{- "<|im_start|>user" -}}
        {%- endif -%}
        {{- "\\n<tool_response>\\n" ~ message.content ~ "\\n</tool_response>" -}}
        {%- if loop.last or loop.nextitem.role != "tool" -%}
            {{- "<|im_end|>\\n" -}}
        {%- endif -%}
    {%- elif message.role == "assistant" -%}
        {{- "<|im_start|>assistant\\n" -}}
        {%- generation -%}
            {{- message.content or "" -}}
            {%- for call in message.tool_calls or [] -%}
                {%- set function = call.function or call -%}
                {{- "\\n" if message.content or not loop.first -}}
                {{- '<tool_call>\\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' -}}
                {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
                {{- "}\\n</tool_call>" -}}
            {%- endfor -%}
            {{- "<|im_end|>" -}}
        {%- endgeneration -%}
        {{- "\\n" -}}
    {%- elif not (loop.first and message.role == "system") -%}
        {{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content ~ "<|im_end|>\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""

NAMED = {"chatml": _CHATML, "llama3": _LLAMA3, "qwen": _QWEN}
"""Text of each template."""
